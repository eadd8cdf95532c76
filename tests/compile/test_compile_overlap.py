from itertools import pairwise

import pytest
from cubin import PROXY_FENCE, beyond_what_is_left, no_local_memory, opcodes, uses
from device_view import INT, attention_views, device_view
from fa4_a2a.cache import cached_kernels
from fa4_a2a.overlap import Counter, Geometry, OverlapPlan, Send, Step, load_overlap, send_order, whole_parts
from fa4_a2a.persistent import DEFAULT_BUILD, load_persistent
from fa4_a2a.signal import FINGERPRINT, MAX_PARTS, PARTS, Flags

from fa_a2a.ops.overlap import words

P, ROWS, HEADS, D = 4, 1152, 6, 128
KEYS = P * ROWS
WORD, MARK = words(1 << 41, 1)


def read(sass, dtype="bfloat16", with_lse=True):
    load_overlap(D, dtype, "sm_90a", 132, with_lse=with_lse)
    return sass(f"overlap-sm_90a-d{D}-{dtype}", with_lse=with_lse)


@pytest.mark.parametrize(("dtype", "with_lse"), [("bfloat16", True), ("float16", False)])
def test_kernel_keeps_its_registers(dtype, with_lse, sass):
    lines = read(sass, dtype, with_lse)
    assert no_local_memory(lines)
    changed = [line for line in lines if "SETMAXREG" in line]
    assert len(changed) == 2, "setmaxnreg is not ignored"
    assert "0x28" in changed[0]
    assert "0xe8" in changed[1]
    mine = [k for k in cached_kernels() if k.name == f"overlap-sm_90a-d{D}-{dtype}" and k.key["with_lse"] == with_lse]
    assert [beyond_what_is_left(k.path) for k in mine] == [[]]
    moves = [op for op in opcodes(lines) if op.startswith(("LDG", "STG")) and ".128" in op]
    loads = sum(op.startswith("LDG") for op in moves)
    assert loads == len(moves) - loads == 8, "two batches of four 16-byte loads and stores"


def test_tensor_core_work_is_the_persistent_kernels(sass):
    load_persistent(D, "bfloat16", "sm_90a", 132, with_lse=True)
    theirs = sass(f"persistent-sm_90a-d{D}-bfloat16", tile=[128, 160], with_lse=True, build=list(DEFAULT_BUILD))
    mma = lambda lines: [op for op in opcodes(lines) if op.startswith("HGMMA")]
    assert mma(read(sass)) == mma(theirs)


def test_a_wait_ends_with_the_proxy_fence(sass):
    """Bulk loads of what a peer stored come behind an acquire and fence.proxy.async, which begins with PROXY_FENCE."""
    lines = read(sass)
    ops = opcodes(lines)
    last_load = max(i for i, op in enumerate(ops) if op.startswith("UTMALDG"))
    acquires = [i for i, line in enumerate(lines[:last_load]) if "LDG.E.64.STRONG.SYS" in line]
    fences = [i for i, op in enumerate(ops[:last_load]) if op == PROXY_FENCE and "FENCE.VIEW.ASYNC" in ops[i + 2]]
    assert fences
    assert all(any(a < f for a in acquires) for f in fences)


def test_a_part_is_published_behind_a_fence(sass):
    """Arrival, fence, word: the last store of a sending warp's step is the word."""
    ops = opcodes(read(sass))
    moves = [i for i, op in enumerate(ops) if op.startswith("STG") and ".128" in op]
    arrival = next(i for i in range(max(moves), len(ops)) if ops[i].startswith("ATOMG"))
    fence = next(i for i in range(arrival, len(ops)) if ops[i].startswith("MEMBAR.ALL.SYS"))
    stores = [i for i in range(arrival, fence + 16) if ops[i].startswith("STG.E.64.STRONG.SYS")]
    assert len(stores) == 2, "the fingerprint and the word"
    assert stores[0] < fence < stores[1]
    assert uses(ops[max(moves) : arrival], "STG") <= 1


@pytest.mark.parametrize(("blocks", "heads", "chunks"), [(9, 6, 4), (1, 1, 1), (3, 2, 1), (1, 5, 2), (7, 3, 3)])
@pytest.mark.parametrize("own_first", [0, 1, 4, 10**6])
def test_own_tiles_first_and_last(blocks, heads, chunks, own_first):
    from host_split import places

    every = [(c, h, b) for c in range(chunks) for h in range(heads) for b in range(blocks)]
    own, remote = every[: blocks * heads], every[blocks * heads :]
    assert places(blocks, heads, chunks, own_first) == own[:own_first] + remote + own[own_first:]


def test_what_is_sent_covers_everything_once():
    for ranks, kv_parts, first in ((2, 4, 0), (4, 2, 1), (8, 1, 7)):
        sends = send_order(ranks, whole_parts(HEADS, kv_parts), first, own=True)
        assert len(set(sends)) == len(sends)
        steps = Geometry(333, HEADS, D, ranks, 160, whole_parts(HEADS, kv_parts)).steps(sends)
        assert all(a[Step.END] == b[Step.BEGIN] for a, b in pairwise(steps))
        assert all(step[Step.BEGIN] < step[Step.END] for step in steps), "an empty part would never be published"
        moved = sum(step[Step.TENSORS] * step[Step.HEADS] * step[Step.ROWS] for step in steps[1:])
        assert moved == (ranks - 1) * 3 * HEADS * 333


@pytest.mark.parametrize(("heads", "kv_parts", "parts"), [(6, 4, 3), (12, 4, 4), (5, 4, 3), (1, 8, 1), (7, 7, 7)])
def test_groups_of_heads_are_not_empty(heads, kv_parts, parts):
    assert whole_parts(heads, kv_parts) == parts


def test_own_rows_fill_the_shared_key_tile():
    shared = lambda rows, ranks: Geometry(rows, 1, D, ranks, 160, 1).own_rows
    assert shared(2304, 2) == 96  # the next chunk ends at row 2304, in the tile of rows 2240 to 2399
    assert shared(160, 2) == 0
    assert shared(37, 3) == 37
    assert shared(100, 1) == 0


def plan(device, kv_parts=2):
    geometry = Geometry(ROWS, HEADS, D, P, 160, kv_parts)
    sends = [Send(0, 0), Send(1, 0)]
    buffers = [[(1 << 40) + (t << 36) + (p << 34) for p in range(P)] for t in range(3)]
    kernel = load_overlap(D, "bfloat16", "sm_90a", 132, with_lse=True)
    return OverlapPlan(kernel, geometry, sends, [1, 2, 3, 0], [1, 0, 3, 2], buffers, [(WORD, MARK)] * P, device)


def test_table_of_steps():
    steps, sources, counters = plan("cpu")._tables
    own, next_ = steps.view(2, Step.WORDS).tolist()
    assert (own[Step.PEER], own[Step.ROWS]) == (1, 64)  # 3456 rows are 21.6 tiles of 160
    assert next_[Step.PEER] == 0
    assert next_[Step.WORD] == (1 << 41) + 8 * (PARTS + MAX_PARTS * 1)
    assert next_[Step.FINGERPRINT] == (1 << 41) + 8 * (FINGERPRINT + 1)
    row_bytes = HEADS * D * 2
    assert next_[Step.TO] == (1 << 40) + ROWS * row_bytes
    assert next_[Step.TO + 1] == (1 << 40) + (1 << 36) + (KEYS - 2 * ROWS) * row_bytes
    assert sources.tolist() == [1, 2, 3, 0]
    assert len(counters) == Counter.SENT + 2
    with pytest.raises(ValueError, match="whole_parts"):
        plan("cpu", kv_parts=4)


def test_calls_reach_the_launch(no_gpu):
    if not no_gpu:
        pytest.skip("the addresses are made up")
    inputs = [device_view((1, ROWS, P * HEADS, D)) for _ in range(3)]
    tables = [device_view((n,), code=INT, bits=64) for n in (26, 4, 5)]
    blocks, counter = (device_view((n,), code=INT, bits=64) for n in (4, 1))
    flags = Flags.ADVANCE | Flags.PUBLISH | Flags.WAIT
    publication = (blocks, counter, 1, P, int(flags), 10**9, 1 << 41)
    kernel = load_overlap(D, "bfloat16", "sm_90a", 132, with_lse=True)
    attention = (*attention_views(P, ROWS, HEADS, D).values(), 1500, 54, 132)
    with pytest.raises(RuntimeError, match="Cuda"):
        kernel(*attention, *inputs, *tables, 2000, 2, 128, 7, *publication)
    inputs[1] = device_view((1, ROWS + 1, P * HEADS, D))
    with pytest.raises((ValueError, TypeError)):
        kernel(*attention, *inputs, *tables, 2000, 2, 128, 7, *publication)


def test_what_cannot_be_compiled_is_refused_before():
    with pytest.raises(ValueError, match="head_dim 64"):
        load_overlap(64, "bfloat16", "sm_90a", 132)
    with pytest.raises(ValueError, match="float32"):
        load_overlap(D, "float32", "sm_90a", 132)
    with pytest.raises(ValueError, match="sm_100a"):
        load_overlap(D, "bfloat16", "sm_100a", 148)
