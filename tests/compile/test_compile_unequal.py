"""The scatter kernel for unequal shards and heads: compiled, and its index arithmetic run on this CPU."""

import ctypes

import pytest
import torch
from cubin import no_local_memory, uses
from fa4_a2a.scatter_unequal import Slice, UnequalPlan, load_unequal

from fa_a2a.layout import ExchangeShape, chunk_owners


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dim", [128, 64])
def test_moves_16_bytes_a_thread_and_loads_before_it_stores(arch, dim, sass):
    load_unequal(dim, "bfloat16", arch)
    lines = sass(f"scatter-unequal-{arch}-d{dim}-bfloat16", path="unequal")
    assert no_local_memory(lines)
    loads = [i for i, x in enumerate(lines) if "LDG.E.NA.128" in x]
    stores = [i for i, x in enumerate(lines) if "STG.E.128" in x]
    assert len(loads) == len(stores) == 4
    assert max(loads) < min(stores)
    assert uses(lines, "MEMBAR.ALL.SYS") >= 1


SHAPES = [
    ExchangeShape(1, 13, 5, 16, 2, 2, shard_sizes=(7, 6)),
    ExchangeShape(2, 11, 7, 16, 4, 2, shard_sizes=(3, 1, 5, 2)),
    ExchangeShape(2, 12, 12, 16, 3, 2, num_kv_heads=4),
    ExchangeShape(1, 8, 28, 16, 8, 2, num_kv_heads=4),
    ExchangeShape(2, 15, 6, 16, 2, 2, num_kv_heads=3, shard_sizes=(8, 4), text_rows=-3),
    ExchangeShape(1, 15, 4, 16, 2, 2, num_kv_heads=1, shard_sizes=(4, 8), text_rows=3),
]


def slices(shape, rank, buffers):
    """[3][P]: as ops/scatter.py makes them, from the definition of the shape."""
    chunk_at = [chunk_owners(p, range(shape.num_ranks), shape.num_ranks).index(rank) for p in range(shape.num_ranks)]
    found = []
    for t in range(3):
        heads = shape.kv_ranges if t else shape.head_ranges
        rows = [shape.shards[rank][0]] * shape.num_ranks
        if t == 0:
            rows = [at * shape.local_seq + shape.own_rows(rank).start for at in chunk_at]
        found.append(
            [
                Slice(b[:, row:].data_ptr(), b.stride(0) * 2, h.start, len(h))
                for b, row, h in zip(buffers[t], rows, heads)
            ]
        )
    return found, chunk_at


@pytest.mark.parametrize("shape", SHAPES)
def test_every_piece_goes_where_it_belongs(shape):
    """All ranks in turn, on real memory: what the pieces say is carried out and compared with slices."""
    import host_unequal

    ranks, dim = shape.num_ranks, shape.head_dim
    extents = [(ranks * shape.local_seq, shape.head_ranges)] + 2 * [(shape.seq_len, shape.kv_ranges)]
    buffers = [[torch.zeros(shape.batch, n, len(h), dim).bfloat16() for h in heads] for n, heads in extents]
    want = [[b.clone() for b in part] for part in buffers]
    for rank in range(ranks):
        wide = [torch.randn(shape.batch, shape.sizes[rank], n + 1, dim).bfloat16() for n in 3 * [shape.num_heads]]
        sent = [wide[0][:, :, :-1]] + [t[:, :, : shape.kv_heads] for t in wide[1:]]  # not contiguous over heads
        places, chunk_at = slices(shape, rank, buffers)
        blocks = torch.zeros(ranks, dtype=torch.int64)
        plan = UnequalPlan(None, (shape.batch, shape.sizes[rank], shape.num_heads, dim), rank, places, blocks, 0, 1)
        out = torch.zeros(sum(t.numel() for t in sent) * ranks // 8 + 2, 2, dtype=torch.int64)
        host_unequal.list_pieces(sent, plan._before[0], out, rank, ranks)
        for source, target in out[1 : int(out[0, 0]) + 1].tolist():
            ctypes.memmove(target, source, 16)
        for t, x in enumerate(sent):
            for p, h in enumerate(shape.kv_ranges if t else shape.head_ranges):
                first = shape.shards[rank][0]
                if t == 0:
                    first = chunk_at[p] * shape.local_seq + shape.own_rows(rank).start
                want[t][p][:, first : first + shape.sizes[rank]] = x[:, :, h.start : h.stop]
    for got, expected in zip(buffers, want):
        assert all(torch.equal(g, e) for g, e in zip(got, expected))


def test_plan_refuses_what_the_kernel_cannot_do():
    blocks, one = torch.zeros(2, dtype=torch.int64), Slice(1 << 40, 256, 0, 2)
    make = lambda slices, shape=(1, 8, 5, 16): UnequalPlan(None, shape, 0, slices, blocks, 0, 1)
    make([[one] * 2] * 3)
    with pytest.raises(ValueError, match="at most 3 heads"):
        make([[one, one._replace(heads=4)]] * 3)
    with pytest.raises(ValueError, match="multiples of 16"):
        make([[one, one._replace(address=8)]] * 3)
    with pytest.raises(ValueError, match="32-bit"):
        make([[one] * 2] * 3, (1, 2**28, 5, 128))
