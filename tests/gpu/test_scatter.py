"""The exchange before attention on one GPU: every rank's buffers are this GPU's, and the ranks launch in turn."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_gpu_ranks import Ranks, draw

PATHS = ("st", "bulk")
ADVANCE, PUBLISH, WAIT = 1, 2, 4
TOP = 2**63


@pytest.fixture
def kernel(device, need):
    """kernel(dim, dtype, path, ...): the compiled kernel for this GPU."""
    scatter = pytest.importorskip("fa4_a2a.scatter")
    major, minor = torch.cuda.get_device_capability(device)
    need("gpu", major >= 9, "bulk copies need sm_90 or later")
    return lambda dim, dtype, *args, **options: scatter.load_scatter(
        dim, str(dtype).removeprefix("torch."), f"sm_{major}{minor}a", *args, **options
    )


CASES = [  # batch, rows, local heads, head_dim, ranks, layout
    (1, 1152, 6, 128, 4, "plain"),
    (1, 1152, 6, 128, 4, "fused"),
    (2, 37, 1, 128, 2, "by_head"),
    (3, 101, 3, 64, 8, "fused"),
    (1, 1, 1, 128, 5, "plain"),
    (2, 257, 6, 64, 3, "heads_first"),
    (1, 333, 3, 72, 4, "fused"),
    (1, 65, 12, 256, 2, "plain"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("batch", "rows", "local_heads", "dim", "ranks", "layout"), CASES)
def test_every_slice_reaches_its_owner_bitwise(device, kernel, path, batch, rows, local_heads, dim, ranks, layout):
    shape, dtype = (batch, rows, local_heads * ranks, dim), torch.bfloat16
    group = Ranks(kernel(dim, dtype, path), device, *shape, ranks, dtype)
    qkv = [draw(device, shape, dtype, layout) for _ in range(ranks)]
    for plan, tensors in zip(group.plans, qkv):
        plan(*tensors, flags=0)
    group.check(qkv)
    assert not group.blocks.any(), "no flag, no publication"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("num_ctas", "own_last"), [(1, False), (7, True), (264, True)])
def test_any_number_of_ctas_and_repeated_calls(device, kernel, path, num_ctas, own_last):
    shape, dtype = (2, 130, 12, 128), torch.float16
    group = Ranks(kernel(128, dtype, path), device, *shape, 4, dtype, num_ctas, own_last)
    for _ in range(3):
        qkv = [draw(device, shape, dtype) for _ in range(4)]
        for plan, tensors in zip(group.plans, qkv):
            plan(*tensors, flags=0)
        group.check(qkv)
        assert not any(plan._before[2].any() for plan in group.plans), "the counters are reset"


@pytest.mark.parametrize("options", [{"path": "st", "unroll": 8, "threads": 512}, {"path": "st", "unroll": 1},
                                     {"path": "bulk", "stages": 2, "stage_bytes": 8192, "threads": 64},
                                     {"path": "bulk", "stages": 6, "stage_bytes": 256, "threads": 1024}])  # fmt: skip
def test_other_block_sizes(device, kernel, options):
    shape, dtype = (1, 211, 12, 128), torch.bfloat16
    group = Ranks(kernel(128, dtype, **options), device, *shape, 4, dtype)
    qkv = [draw(device, shape, dtype, "fused") for _ in range(4)]
    for plan, tensors in zip(group.plans, qkv):
        plan(*tensors, flags=0)
    group.check(qkv)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("before", [0, 41, TOP - 1, -1])
def test_publishes_epoch_and_fingerprint_to_every_rank(device, kernel, path, before):
    from fa4_a2a.signal import ARRIVED, EPOCH, FINGERPRINT

    shape, dtype, ranks = (1, 64, 8, 128), torch.bfloat16, 4
    group = Ranks(kernel(128, dtype, path), device, *shape, ranks, dtype)
    group.blocks[:, EPOCH] = before
    group.blocks[:, ARRIVED : ARRIVED + ranks] = before
    qkv = [draw(device, shape, dtype) for _ in range(ranks)]
    for rank, plan in enumerate(group.plans):
        last = rank == ranks - 1  # the others have published by then, so it need not wait long
        plan(*qkv[rank], fingerprint=7, flags=ADVANCE | PUBLISH | WAIT * last, deadline_ns=5 * 10**9)
    torch.cuda.synchronize()
    now = (before + 1 + TOP) % (2 * TOP) - TOP
    want = torch.zeros_like(group.blocks)
    want[:, EPOCH] = now
    want[:, ARRIVED : ARRIVED + ranks] = now
    want[:, FINGERPRINT : FINGERPRINT + ranks] = 7
    assert torch.equal(group.blocks, want)
    assert not group.record.any()
    group.check(qkv)


def test_graph_replays_are_new_calls(device, kernel):
    from fa4_a2a.signal import EPOCH

    shape, dtype = (1, 256, 4, 128), torch.bfloat16
    group = Ranks(kernel(128, dtype), device, *shape, 1, dtype)
    q, k, v = draw(device, shape, dtype)
    group.plans[0](q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            group.plans[0](q, k, v)
    for n in range(1, 4):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        group.check([(q, k, v)])
        assert group.blocks[0, EPOCH] == 1 + 2 * n


def test_a_peer_that_never_comes_ends_in_a_record(device, kernel):
    """In a process of its own: the kernel traps, and a CUDA context does not survive that."""
    kernel(128, torch.bfloat16)
    here = Path(__file__).parent
    code = f"""
import sys, torch
sys.path[:0] = [{str(here)!r}, {str(here.parents[1] / "cute")!r}]
from fa4_a2a.scatter import load_scatter
from one_gpu_ranks import Ranks, draw
device = torch.device("cuda", 0)
arch = "sm_{{}}{{}}a".format(*torch.cuda.get_device_capability())
group = Ranks(load_scatter(128, "bfloat16", arch), device, 1, 64, 8, 128, 2, torch.bfloat16)
q, k, v = draw(device, group.shape, torch.bfloat16)
torch.cuda.synchronize()
group.plans[0](q, k, v, deadline_ns=10**7, fingerprint=5)
try:
    torch.cuda.synchronize()
except Exception:
    print(group.record.tolist(), flush=True)
import os; os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == str([1, 0, 0, 1, 1, 0, 5, 0]), done.stderr


# -- norm and rotary embedding -----------------------------------------------------------------------------------------


def norm_rope_reference(x, weight, cos, sin, eps, rope, out_dtype):
    """(B, s, H, D): RMS-norm over D, then rotary embedding, as separate operations in float32, rounded once."""
    x = x.float()
    if weight is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    if rope:
        dim = x.shape[-1]
        if cos.shape[-1] < dim:
            repeat = (lambda t: t.repeat_interleave(2, -1)) if rope == "interleaved" else (lambda t: t.repeat(1, 2))
            cos, sin = repeat(cos), repeat(sin)
        if rope == "interleaved":
            first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack([-second, first], -1).flatten(-2)
        else:
            first, second = x.chunk(2, -1)
            turned = torch.cat([-second, first], -1)
        x = x * cos.float()[:, None] + turned * sin.float()[:, None]
    return x.to(out_dtype)


NORM_ROPES = [  # norm, rope, pairs, weight_dtype, table_dtype, head_dim, dtype
    (True, "interleaved", False, "bfloat16", "float32", 128, torch.bfloat16),
    (True, "interleaved", True, "float32", "float32", 64, torch.bfloat16),
    (True, "halves", False, "bfloat16", "bfloat16", 128, torch.bfloat16),
    (True, "halves", True, "float16", "float32", 64, torch.float16),
    (True, "", False, "bfloat16", "float32", 256, torch.bfloat16),
    (False, "interleaved", True, "bfloat16", "bfloat16", 128, torch.float16),
    (False, "halves", False, "bfloat16", "float32", 32, torch.bfloat16),
]


@pytest.mark.parametrize("case", NORM_ROPES)
def test_norm_and_rope_equal_separate_operations(device, kernel, case):
    from fa4_a2a.scatter import NormRope

    norm, rope, pairs, weight_dtype, table_dtype, dim, dtype = case
    shape, ranks, eps = (2, 77, 6, dim), 2, 1e-6
    options = NormRope(norm, rope, pairs, weight_dtype, table_dtype)
    group = Ranks(kernel(dim, dtype, norm_rope=options), device, *shape, ranks, dtype)
    weights = [None, None]
    if norm:
        weights = [(1 + torch.randn(dim, device=device)).to(getattr(torch, weight_dtype)) for _ in range(2)]
    cos = sin = None
    if rope:
        angle = torch.randn(shape[1], dim // 2 if pairs else dim, device=device)
        cos, sin = (f(angle).to(getattr(torch, table_dtype)) for f in (torch.cos, torch.sin))
    qkv = [draw(device, shape, dtype, "fused") for _ in range(ranks)]
    for plan, tensors in zip(group.plans, qkv):
        plan(*tensors, flags=0, q_weight=weights[0], k_weight=weights[1], cos=cos, sin=sin, eps=eps)
    made = [
        [norm_rope_reference(x, w, cos, sin, eps, rope, torch.float32) for x, w in zip(qk, weights)] + [v]
        for *qk, v in qkv
    ]
    rounded = group.want([[x.to(dtype) for x in tensors] for tensors in made])
    assert torch.equal(group.whole[2].view(torch.int16), rounded[2].view(torch.int16)), "v is not touched"
    got, want = group.whole[:2].float(), rounded[:2].float()
    assert torch.equal(got.isnan(), want.isnan())
    # float32 sums in another order: the result may round to the neighbour in dtype, no further
    ulp = torch.finfo(dtype).eps
    assert ((got - want).abs() <= ulp * want.abs() + 1e-5).logical_or(want.isnan()).all()
    assert (got != want).logical_and(~want.isnan()).float().mean() < 0.02
    if norm and weight_dtype == str(dtype).removeprefix("torch."):
        apart = qkv[0][0], weights[0]
        separate = torch.nn.functional.rms_norm(apart[0], (dim,), apart[1], eps)  # rounds between norm and rope
        separate = norm_rope_reference(separate, None, cos, sin, eps, rope, torch.float32)
        ours = made[0][0]
        assert (separate - ours).abs().max() <= 4 * ulp * ours.abs().max()
