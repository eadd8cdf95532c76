"""The persistent kernel of sm_100 on one GPU: bitwise equal to the stock kernel. Written without one; not run yet."""

from functools import cache

import pytest
import torch
from test_persistent import RANKS, SHAPES, Case, Signals

ARCH = "sm_100a"
BUILDS = {"default": {}, "clock": {"pace": "clock"}, "slices of 8": {"slice_rows": 8}}


@pytest.fixture(autouse=True)
def _sm100(device):
    if torch.cuda.get_device_capability(device) != (10, 0):
        pytest.skip("needs a GPU of compute capability 10.0")


@cache
def kernels(device, dim, dtype, build, **more):
    from fa4_a2a.forward import load_forward
    from fa4_a2a.persistent import Build, load_persistent

    name, sms = str(dtype).removeprefix("torch."), torch.cuda.get_device_properties(device).multi_processor_count
    made = Build(**{**BUILDS[build], **more})
    stock = load_forward(dim, name, ARCH, sms, None, True)
    return stock, load_persistent(dim, name, ARCH, sms, None, True, build=made)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_stock_kernel_bitwise(device, dim, build, shape):
    stock, persistent = kernels(device, dim, torch.bfloat16, build)
    Case(device, *shape, dim, torch.bfloat16).compare(stock, persistent, (0, 1500), (0, 1, 2))


@pytest.mark.parametrize("num_sms", [1, 7, 1000])
def test_any_number_of_ctas(device, num_sms):
    """With D = 128 CTAs come in pairs: 1 is one pair, 7 are three."""
    stock, persistent = kernels(device, 128, torch.float16, "default")
    shape = (3, 300, 2, 500) if num_sms == 1 else (4, 640, 5, 1100)
    Case(device, *shape, 128, torch.float16).compare(stock, persistent, (0, 2000), (0, 1), num_sms=num_sms)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (4, 1152, 6, 4608), (8, 127, 3, 700)])
def test_release_publishes_the_epoch_to_every_rank(device, dim, shape):
    from fa4_a2a.signal import EPOCH, READY, Flags

    stock, persistent = kernels(device, dim, torch.bfloat16, "default", release=True)
    case, signals = Case(device, *shape, dim, torch.bfloat16), Signals(device)
    want = case.run(stock)
    signals.blocks[:, EPOCH] = 42
    signals.blocks[signals.rank, READY : READY + RANKS] = 42  # the peers have published already
    expected = signals.blocks.clone()
    expected[:, READY + signals.rank] = 42
    for _ in range(10):
        got = case.run(persistent, 1500, signals.publication(Flags.PUBLISH | Flags.WAIT))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(want, got))
        assert torch.equal(signals.blocks, expected)
        assert signals.counter.item() == 0
        assert not signals.record.any()
