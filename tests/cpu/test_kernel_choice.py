"""Which kernel `auto` takes on GPUs, from what the ranks have reported. What a GPU would say is given."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from test_advice import REQUEST

from fa_a2a.errors import UnsupportedError
from fa_a2a.ops import advice, kernel_choice, kernels, overlap_schedule
from fa_a2a.ops.kernel_choice import choose, uncompiled_key
from fa_a2a.xstage.speeds import Speed

DEVICE = torch.device("cuda", 0)
FUSED = dataclasses.replace(REQUEST, exchange="fused")
SMALL_HEADS = dataclasses.replace(FUSED, head_dim=64)  # 216 tiles of 128 rows end before 144 of 192


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(overlap_schedule, "world", lambda: SimpleNamespace(size=4))


def reports(ranks=4, **more):
    able = {"cpu": "no", "torch": None, "fa4": None, "fa3": None}
    late = {uncompiled_key(name): None for name in kernels.KERNELS}
    return [
        {"request": "{}", "error": None, advice.GPU: "NVIDIA H200/9.0", **able, **late} | more for _ in range(ranks)
    ]


def group(ranks=4):
    return SimpleNamespace(size=ranks, rank=0)


def speeds(monkeypatch, fa3, scatter=0.01):
    """As many TFLOP/s as fa4 times `fa3`."""
    table = {("fa4", d): Speed(600.0, 0.0) for d in (64, 128)} | {
        ("fa3", d): Speed(600 * fa3, scatter) for d in (64, 128)
    }
    monkeypatch.setattr(advice, "shipped_speeds", lambda device: table)


def test_the_kernel_that_is_ready_first(monkeypatch):
    speeds(monkeypatch, 1.1)
    choice, reason = choose(group(), FUSED, reports(), DEVICE)
    assert choice == "fa3"
    assert (
        reason.startswith("kernel 'fa3': X-Stage expects attention and exchange to take 'fa4' ") and "until" in reason
    )
    speeds(monkeypatch, 0.9)
    assert choose(group(), FUSED, reports(), DEVICE)[0] == "fa4"


def test_the_speed_of_the_tile_that_will_run_counts(monkeypatch):
    """fa3 loses more to its smaller tile than fa4, by 0.82 to 0.844."""
    speeds(monkeypatch, 1.02)
    assert choose(group(), SMALL_HEADS, reports(), DEVICE)[0] == "fa4"
    long = dataclasses.replace(SMALL_HEADS, seq_len=8192)  # tiles of 192 rows
    assert choose(group(), long, reports(), DEVICE)[0] == "fa3"


def test_a_difference_within_the_scatter_leaves_fa4(monkeypatch):
    speeds(monkeypatch, 1.05, scatter=0.1)
    choice, reason = choose(group(), FUSED, reports(), DEVICE)
    assert choice == "fa4" and reason.startswith("kernel 'fa4': ") and "and knows their speeds to" in reason


def test_no_call_waits_for_a_compiler_unasked(monkeypatch):
    """One rank without the object is enough, and which rank asks makes no difference."""
    speeds(monkeypatch, 1.1)
    told = reports()
    told[2] = told[2] | {uncompiled_key("fa3"): "it is not compiled"}
    choice, reason = choose(group(), FUSED, told, DEVICE)
    assert choice == "fa4"
    assert (
        reason.startswith("kernel 'fa4', though 'fa3': X-Stage expects") and "on rank 2: it is not compiled" in reason
    )
    assert choose(group(), dataclasses.replace(FUSED, kernel="fa3"), told, DEVICE) == ("fa3", "")


def test_compiled_means_every_object_of_the_head(monkeypatch, tmp_path):
    from fa_a2a.native import build

    monkeypatch.setenv("FA_A2A_CACHE_DIR", str(tmp_path))
    (tmp_path / "fa3").mkdir()
    paths = [build.cached(v) for v in build.variants(64, "bfloat16")]
    for path in paths:
        assert "fa-a2a compile --kernel fa3" in kernels.uncompiled("fa3", DEVICE, torch.bfloat16, 64)
        path.touch()
    assert kernels.uncompiled("fa3", DEVICE, torch.bfloat16, 64) is None
    assert kernels.uncompiled("fa3", DEVICE, torch.float16, 64) is not None
    assert kernels.uncompiled("fa4", DEVICE, torch.bfloat16, 64) is None
    assert kernels.uncompiled("fa3", DEVICE, torch.bfloat16, 96) is None  # it cannot run that at all
    assert kernels.uncompiled("fa3", torch.device("cpu"), torch.float16, 64) is None


@pytest.mark.parametrize(
    ("ranks", "request_"),
    [
        (4, dataclasses.replace(REQUEST, exchange="collective")),
        (4, dataclasses.replace(REQUEST, exchange="overlapped")),
        (4, dataclasses.replace(FUSED, shard_sizes=(1, 1, 1, 4605))),
        (4, dataclasses.replace(FUSED, key_lengths=(7,))),
        (4, dataclasses.replace(REQUEST, seq_len=16384)),  # auto: overlapped is expected to pay
        (1, FUSED),
        (3, FUSED),  # no profile
    ],
)
def test_fa4_where_kernels_are_not_compared(monkeypatch, ranks, request_):
    speeds(monkeypatch, 2.0)
    monkeypatch.setattr(overlap_schedule, "world", lambda: SimpleNamespace(size=ranks))
    assert choose(group(ranks), request_, reports(ranks), DEVICE) == ("fa4", "")


def test_auto_compares_where_overlapping_does_not_pay(monkeypatch):
    speeds(monkeypatch, 2.0)
    monkeypatch.setattr(overlap_schedule, "loss", lambda shape, device: "it would not pay")
    assert choose(group(), REQUEST, reports(), DEVICE)[0] == "fa3"
    monkeypatch.setattr(overlap_schedule, "loss", lambda shape, device: None)
    assert choose(group(), REQUEST, reports(), DEVICE) == ("fa4", "")


def test_fa3_alone(monkeypatch):
    gone = reports(fa4="kernel 'fa4' needs the package that provides 'flash_attn'")
    assert choose(group(), FUSED, gone, DEVICE) == ("fa3", "")
    late = [x | {uncompiled_key("fa3"): "it is not compiled; so do"} for x in gone]
    choice, reason = choose(group(), FUSED, late, DEVICE)
    assert choice == "torch"
    assert reason.startswith("kernel falls back to 'torch': rank 0: kernel 'fa4' needs the package")
    assert reason.endswith("kernel 'fa3' on rank 0: it is not compiled; so do")
    nothing = [x | {"torch": "kernel 'torch' returns no log-sum-exp"} for x in late]
    with pytest.raises(UnsupportedError, match="no kernel runs this: rank 0: kernel 'fa4' needs"):
        choose(group(), FUSED, nothing, DEVICE)


def test_a_kernel_that_has_not_run_here_is_not_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    choice, reason = choose(group(), FUSED, reports(), DEVICE)
    assert choice == "torch" and "has not been run on one" in reason


def test_ranks_that_cannot_are_named():
    told = reports()
    told[1] = told[1] | {"fa3": "kernel 'fa3' is not in the cache, and compiling it needs nvcc"}
    with pytest.raises(UnsupportedError, match=r"rank 1: kernel 'fa3' is not in the cache.*; use kernel='auto'"):
        choose(group(), dataclasses.replace(FUSED, kernel="fa3"), told, DEVICE)
    assert choose(group(), FUSED, told, DEVICE) == ("fa4", "")
    assert kernel_choice.BEST_KNOWN[0] == "fa4"
