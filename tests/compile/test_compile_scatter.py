import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cubin import no_local_memory, uses
from device_view import FLOAT, INT, device_view
from fa4_a2a.scatter import Counter, NormRope, ScatterPlan, load_scatter

ARCHS = ("sm_90a", "sm_100a")
NORM_ROPES = [
    NormRope(),
    NormRope(rope="halves", pairs=True, weight_dtype="float32"),
    NormRope(rope="halves", table_dtype="bfloat16"),
    NormRope(norm=False, pairs=True, table_dtype="bfloat16"),
    NormRope(rope=""),
]


def instructions(sass, path, arch, dim=128, dtype="bfloat16", **options):
    load_scatter(dim, dtype, arch, path, **options)
    norm_rope = options.pop("norm_rope", None)
    key = {"path": path, **options}
    if path == "st":
        key["norm_rope"] = None if norm_rope is None else norm_rope._asdict()
    return sass(f"scatter-{path}-{arch}-d{dim}-{dtype}", **key)


def publishes(lines):
    """Arrival at GPU scope, then the system fence, then the epoch: the order on which the protocol rests."""
    strong = [x for x in lines if "MEMBAR.ALL.GPU" in x or "MEMBAR.ALL.SYS" in x or "ATOMG" in x]
    fence = next(i for i, x in enumerate(strong) if "MEMBAR.ALL.SYS" in x)
    return "MEMBAR.ALL.GPU" in strong[fence - 2] and "ATOMG" in strong[fence - 1]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dim", "dtype", "unroll"), [(128, "bfloat16", 4), (64, "float16", 8), (72, "bfloat16", 4)])
def test_st_moves_16_bytes_a_thread_and_loads_before_it_stores(arch, dim, dtype, unroll, sass):
    lines = instructions(sass, "st", arch, dim, dtype, unroll=unroll)
    assert no_local_memory(lines)
    loads = [i for i, x in enumerate(lines) if "LDG.E.NA.128" in x]
    stores = [i for i, x in enumerate(lines) if "STG.E.128" in x]
    assert len(loads) == len(stores) == unroll
    assert max(loads) < min(stores)
    tickets = [i for i, x in enumerate(lines) if "ATOMG" in x and i < min(stores)]
    assert [i > max(loads) for i in tickets] == [True], "nothing waits for a ticket before the loads are out"
    assert publishes(lines)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", [128, 64])
def test_bulk_moves_by_bulk_copies_alone(arch, dim, sass):
    lines = instructions(sass, "bulk", arch, dim)
    assert no_local_memory(lines)
    assert uses(lines, "UBLKCP.S.G") == 1
    assert uses(lines, "UBLKCP.G.S") == 1
    assert not uses(lines, "STG.E.128")
    assert publishes(lines)


@pytest.mark.parametrize("norm_rope", NORM_ROPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_norm_and_rope_stay_in_registers(arch, norm_rope, sass):
    lines = instructions(sass, "st", arch, norm_rope=norm_rope)
    assert no_local_memory(lines)
    assert uses(lines, "STG.E.128") == 4
    assert bool(uses(lines, "MUFU.RSQ")) == norm_rope.norm
    assert publishes(lines)


B, S_LOCAL, H, D, P = 2, 1152, 24, 128, 4


@pytest.fixture
def arguments():
    """Views of one fused projection, and what a rank of four passes besides."""
    fused = (S_LOCAL * 3 * H * D, 3 * H * D, D, 1)
    words = {"destinations": 3 * P, "peer_blocks": P, "counters": len(Counter)}
    qkv = {n: device_view((B, S_LOCAL, H, D), fused, address=(1 << 40) + 2 * i * H * D) for i, n in enumerate("qkv")}
    tables = {n: device_view((n_words,), code=INT, bits=64) for n, n_words in words.items()}
    options = dict.fromkeys(("q_weight", "k_weight", "cos", "sin"))
    scalars = {"eps": 1e-6, "rank": 0, "num_ranks": P, "num_ctas": 132, "own_last": 0, "flags": 7}
    return {**qkv, **tables, **options, **scalars, "fingerprint": 1, "deadline_ns": 10**9, "record": 1 << 41}


@pytest.mark.parametrize("path", ["st", "bulk"])
def test_call_reaches_the_launch(path, arguments, no_gpu):
    if not no_gpu:
        pytest.skip("the addresses are made up")
    kernel = load_scatter(D, "bfloat16", "sm_90a", path)
    with pytest.raises(RuntimeError, match="Cuda"):
        kernel(*arguments.values())
    one = {n: device_view((1, S_LOCAL, H, D), (1, H * D, D, 1)) for n in "qkv"}  # DLPack's stride of a single batch
    with pytest.raises(RuntimeError, match="Cuda"):
        kernel(*{**arguments, **one}.values())


def test_norm_and_rope_arguments_reach_the_launch(arguments, no_gpu):
    if not no_gpu:
        pytest.skip("the addresses are made up")
    given = {n: device_view((D,)) for n in ("q_weight", "k_weight")}
    given |= {n: device_view((S_LOCAL, D), code=FLOAT, bits=32) for n in ("cos", "sin")}
    with pytest.raises(RuntimeError, match="Cuda"):
        load_scatter(D, "bfloat16", "sm_90a", norm_rope=NormRope())(*{**arguments, **given}.values())
    given["cos"] = device_view((S_LOCAL + 1, D), code=FLOAT, bits=32)
    with pytest.raises((TypeError, ValueError), match=r"cos|#8"):
        load_scatter(D, "bfloat16", "sm_90a", norm_rope=NormRope())(*{**arguments, **given}.values())


WRONG = {
    "extent": ("k", lambda: device_view((B, S_LOCAL + 1, H, D))),
    "heads": ("v", lambda: device_view((B, S_LOCAL, H + P, D))),
    "head_dim": ("q", lambda: device_view((B, S_LOCAL, H, 64))),
    "dtype": ("v", lambda: device_view((B, S_LOCAL, H, D), code=FLOAT)),
    "alignment": ("k", lambda: device_view((B, S_LOCAL, H, D), address=(1 << 40) + 8)),
    "stride": ("q", lambda: device_view((B, S_LOCAL, H, D), (S_LOCAL * H * D, H * D + 4, D, 1))),
    "not_contiguous": ("k", lambda: device_view((B, S_LOCAL, H, D), (S_LOCAL * H * D * 2, H * D * 2, 2 * D, 2))),
    "missing": ("counters", lambda: None),
    "not_asked_for": ("cos", lambda: device_view((S_LOCAL, D), code=FLOAT, bits=32)),
}


@pytest.mark.parametrize("what", WRONG)
def test_call_names_a_wrong_argument(what, arguments):
    name, make = WRONG[what]
    with pytest.raises((ValueError, TypeError), match=rf"{name}|argument #{list(arguments).index(name)}"):
        load_scatter(D, "bfloat16", "sm_90a")(*{**arguments, name: make()}.values())


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"path": "tma"}, "bulk"),
        ({"head_dim": 100}, "100"),
        ({"threads": 100}, "100"),
        ({"path": "bulk", "norm_rope": NormRope()}, "registers"),
        ({"path": "bulk", "stages": 1}, "stages"),
        ({"path": "bulk", "stage_bytes": 1 << 16}, "do not fit"),
        ({"head_dim": 72, "norm_rope": NormRope()}, "72"),
        ({"norm_rope": NormRope(rope="whole")}, "whole"),
        ({"norm_rope": NormRope(norm=False, rope="")}, "neither"),
    ],
)
def test_options_without_a_kernel_are_refused_before_compiling(options, names):
    with pytest.raises(ValueError, match=names):
        load_scatter(**{"head_dim": 128, "dtype": "bfloat16", "arch": "sm_90a", **options})


def expected_bytes(batch, rows, heads, strides, ranks, rank, chunk_at):
    """(source, destination) of every 16 bytes, from the definition; addresses relative to the tensors and buffers."""
    import host_scatter

    dim, local = host_scatter.HEAD_DIM, heads // ranks
    b, s, h, c = torch.meshgrid(*(torch.arange(n) for n in (batch, rows, heads, dim * 2 // 16)), indexing="ij")
    source = 2 * (b * strides[0] + s * strides[1] + h * strides[2]) + 16 * c
    at = torch.tensor([chunk_at, [rank] * ranks, [rank] * ranks])  # [3][P]
    peer = h // local
    found = []
    for tensor in range(3):
        row = at[tensor][peer] * rows + s
        there = ((b * ranks * rows + row) * local + h % local) * dim * 2 + 16 * c
        found.append(torch.stack([torch.full_like(b, tensor), source, peer, there], -1).reshape(-1, 4))
    return torch.cat(found)


@pytest.mark.parametrize("own_last", [0, 1])
@pytest.mark.parametrize("path", ["st", "bulk"])
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "ranks", "fused"),
    [(1, 13, 4, 4, False), (2, 37, 6, 2, True), (3, 5, 24, 8, True), (1, 9, 3, 1, False), (2, 7, 15, 5, False)],
)
def test_every_byte_goes_where_it_belongs(path, own_last, batch, rows, heads, ranks, fused):
    """The kernels' own index arithmetic on this CPU, with batches too far apart for 32 bits."""
    import host_scatter

    dim, width = host_scatter.HEAD_DIM, 3 if fused else 1
    head_stride = dim * width if fused else dim
    strides = (1 << 33, heads * dim * width + 8, head_stride, 1)
    rank, base, gap = ranks - 1, 1 << 41, 1 << 37
    chunk_at = [(rank - p) % ranks for p in range(ranks)]
    buffers = [[base + (3 * p + t) * gap for p in range(ranks)] for t in range(3)]
    plan = ScatterPlan(
        None, (batch, rows, heads, dim), rank, buffers, chunk_at, torch.zeros(ranks, dtype=torch.int64), 0, 1
    )
    view = host_scatter.host_view
    sources = [view((batch, rows, heads, dim), strides, (1 << 45) + t * (1 << 39)) for t in range(3)]
    want = expected_bytes(batch, rows, heads, strides, ranks, rank, chunk_at)
    out = torch.zeros(len(want) + 2, 3, dtype=torch.int64)
    words = [view(x.shape, x.stride(), x.data_ptr(), INT, 64) for x in (plan._before[0], out)]
    host_scatter.list_copies(path, sources, *words, rank, ranks, own_last)
    count = int(out[0, 0])
    assert 0 < count <= len(want)
    size, source, there = out[1 : count + 1].T
    assert int(size.sum()) == 16 * len(want)
    n = torch.repeat_interleave(size // 16)  # of each 16 bytes: the copy it is part of
    step = 16 * (torch.arange(len(n)) - (size // 16).cumsum(0).sub(size // 16)[n])
    source, there = source[n] + step - (1 << 45), there[n] + step - base
    buffer = there // gap
    assert torch.equal(source >> 39, buffer % 3)
    got = torch.stack([buffer % 3, source % (1 << 39), buffer // 3, there % gap], -1)
    assert torch.equal(torch.unique(got, dim=0), torch.unique(want, dim=0))
    if own_last:
        assert (got[-(len(want) // ranks) :, 2] == rank).all()


def test_plan_refuses_what_the_kernel_cannot_do():
    blocks = torch.zeros(4, dtype=torch.int64)
    addresses = [[1 << 40] * 4] * 3
    make = lambda shape=(1, 8, 24, 128), addresses=addresses: ScatterPlan(
        None, shape, 0, addresses, [0] * 4, blocks, 0, 1
    )
    with pytest.raises(ValueError, match="22 heads"):
        make(shape=(1, 8, 22, 128))
    with pytest.raises(ValueError, match="32-bit"):
        make(shape=(1, 2**27, 24, 128))
    with pytest.raises(ValueError, match="multiples of 16"):
        make(addresses=[[8] * 4] * 3)
    with pytest.raises(ValueError, match="the plan is for"):
        make()(*(torch.zeros(1, 9, 24, 128) for _ in range(3)))


def test_importing_is_cheap():
    code = "import sys, fa4_a2a.scatter; print([m for m in ('torch', 'cutlass', 'tvm_ffi') if m in sys.modules])"
    root = Path(__file__).parents[2] / "cute"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
