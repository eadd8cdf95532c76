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


def test_the_kernel_whose_stores_cost_least(monkeypatch):
    assert advice.kernel(["fa4"], REQUEST, reports()) == ("fa4", "")
    designs = {"fa4": DESIGNS["stock"], "other": DESIGNS["persistent"]}
    monkeypatch.setattr(advice, "design_of", lambda kernel, capability: designs.get(kernel))
    choice, reason = advice.kernel(["fa4", "other"], REQUEST, reports())
    assert choice == "other"
    assert (
        reason == "kernel 'other': X-Stage expects its stores to cost least until ready (us: 'fa4' 13.8, 'other' 5.8)"
    )
    assert advice.kernel(["fa4", "unknown"], REQUEST, reports()) == ("fa4", "")


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
