"""What 'auto' makes of the model: the same on every rank, in words, and nothing where the model does not know."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import fa_a2a
from fa_a2a import UlyssesAttention
from fa_a2a.ops import advice
from fa_a2a.ops.request import Request
from fa_a2a.xstage import DESIGNS, load_profile
from fa_a2a.xstage.speeds import Speed

REQUEST = Request(
    batch=1,
    seq_len=4608,
    num_heads=24,
    head_dim=128,
    dtype="bfloat16",
    device="cuda",
    kernel="auto",
    exchange="auto",
    scale=0.1,
    with_lse=False,
    head_sharded=False,
)


def reports(ranks=4, gpu="NVIDIA H200/9.0"):
    return [{"request": "{}", "error": None, advice.GPU: gpu}] * ranks


def test_fused_with_the_numbers():
    choice, reason = advice.exchange(REQUEST, "fa4", reports())
    assert choice == "fused"
    expected = "2.8 us sender-visible and 5.8 us until ready of the fused exchange, 21 us or more of a collective"
    assert expected in reason and "h200x4" in reason and "falls back" not in reason
    assert "h200x2" in advice.exchange(REQUEST, "fa4", reports(2))[1]


def test_collective_where_the_fused_exchange_ends_later(monkeypatch):
    """A machine whose last block needs 50 us to publish."""
    slow = dataclasses.replace(load_profile("h200x4"), publish_inside_us=50.0)
    monkeypatch.setattr(advice, "shipped_profile", lambda ranks, device: slow)
    choice, reason = advice.exchange(REQUEST, "fa4", reports())
    assert choice == "collective" and reason.startswith("exchange falls back to 'collective': X-Stage")
    long = dataclasses.replace(REQUEST, seq_len=32768)
    assert advice.exchange(long, "fa4", reports())[0] == "fused"  # 107 us of bytes


@pytest.mark.parametrize(
    ("request_", "kernel", "told"),
    [
        (REQUEST, "fa4", reports(8)),  # no such profile
        (REQUEST, "fa4", reports(gpu="NVIDIA B200/10.0")),
        (REQUEST, "fa4", reports(gpu="NVIDIA H200/10.0")),
        (REQUEST, "fa4", [*reports(3), *reports(1, "NVIDIA H100/9.0")]),
        (REQUEST, "fa4", reports(gpu=None)),  # CPU processes
        (REQUEST, "torch", reports()),
        (dataclasses.replace(REQUEST, head_dim=96), "fa4", reports()),
        (dataclasses.replace(REQUEST, num_heads=30), "fa4", reports()),
    ],
)
def test_no_advice_without_a_model(request_, kernel, told):
    assert advice.exchange(request_, kernel, told) is None


def test_the_kernel_that_is_ready_first(monkeypatch):
    """Of equal speed: two waves of 29 steps of 160 keys at 600 TFLOP/s, then the stores."""
    assert advice.kernel(["fa4"], REQUEST, reports()) == ("fa4", "")
    designs = {"fa4": DESIGNS["stock"], "other": DESIGNS["persistent"], "unmeasured": DESIGNS["persistent"]}
    monkeypatch.setattr(advice, "design_of", lambda kernel, capability: designs.get(kernel))
    speeds = {("fa4", 128): Speed(600.0, 0.0), ("other", 128): Speed(600.0, 0.01)}
    monkeypatch.setattr(advice, "shipped_speeds", lambda device: speeds)
    attention_us = 2 * 4 * 128 * 29 * 160 * 128 * 132 / 600e6
    numbers = f"'fa4' {attention_us + 13.8:.1f}, 'other' {attention_us + 5.8:.1f} us until ready"
    choice, reason = advice.kernel(["fa4", "other"], REQUEST, reports())
    assert (choice, reason) == ("other", f"kernel 'other': X-Stage expects attention and exchange to take {numbers}")
    for candidates in (["fa4", "unknown"], ["fa4", "unmeasured"]):
        assert advice.kernel(candidates, REQUEST, reports()) == ("fa4", "")
    speeds["other", 128] = Speed(600.0, 0.1)
    choice, reason = advice.kernel(["fa4", "other"], REQUEST, reports())
    assert choice == "fa4" and reason.endswith(f"{numbers}, and knows their speeds to {attention_us / 10:.1f} us")


def test_a_cpu_is_no_gpu():
    assert advice.gpu_of(torch.device("cpu")) is None


def test_a_call_in_steady_state_asks_no_model(monkeypatch):
    asked = []
    monkeypatch.setattr(advice, "gpu_of", lambda device: asked.append(device))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = UlyssesAttention()
        for _ in range(3):
            layer(*torch.randn(3, 1, 32, 2, 16))
        assert len(asked) == 1
        layer(*torch.randn(3, 1, 64, 2, 16))
        assert len(asked) == 2
    finally:
        fa_a2a.close()
        dist.destroy_process_group()
