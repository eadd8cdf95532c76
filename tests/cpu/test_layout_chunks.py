"""Chunk order, launches of equal stride, and tile order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_a2a.layout import MAX_TMA_STRIDE_BYTES, Run, chunk_owners, equal_stride_runs, tile_order


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_whole_world_is_found_in_rotated_order(size):
    for rank in range(size):
        owners = chunk_owners(rank, range(size), size)
        assert owners == tuple((rank + c) % size for c in range(size))


@pytest.mark.parametrize(
    ("rank", "owners", "places"),
    [
        (0, (0, 1, 2, 3), (0, 1, 2, 3)),
        (1, (1, 2, 3, 0), (0, 1, 2, 7)),
        (2, (2, 3, 0, 1), (0, 1, 6, 7)),
        (3, (3, 0, 1, 2), (0, 5, 6, 7)),
    ],
)
def test_group_0123_of_8(rank, owners, places):
    assert chunk_owners(rank, (0, 1, 2, 3), 8) == owners
    assert tuple((owner - rank) % 8 for owner in owners) == places


@pytest.mark.parametrize(("rank", "owners"), [(0, (0, 1, 2)), (1, (1, 2, 0)), (2, (2, 0, 1))])
def test_group_012_of_4(rank, owners):
    assert chunk_owners(rank, (0, 1, 2), 4) == owners


def test_group_ranks_out_of_place_order():
    """Group ranks 0, 1, 2 lie at places 5, 1, 3 of 8: rank 0 meets 1 (place 1, four on) before 2 (place 3, six on)."""
    assert chunk_owners(0, (5, 1, 3), 8) == (0, 1, 2)
    assert chunk_owners(1, (5, 1, 3), 8) == (1, 2, 0)
    assert chunk_owners(2, (5, 1, 3), 8) == (2, 0, 1)


@st.composite
def groups(draw):
    world = draw(st.integers(1, 32))
    positions = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True))
    return draw(st.integers(0, len(positions) - 1)), positions, world


@given(groups())
def test_every_rank_owns_one_chunk_own_first_distances_rising(group):
    rank, positions, world = group
    owners = chunk_owners(rank, positions, world)
    distances = [(positions[p] - positions[rank]) % world for p in owners]
    assert owners[0] == rank
    assert sorted(owners) == list(range(len(positions)))
    assert distances == sorted(set(distances))


@pytest.mark.parametrize(
    ("addresses", "runs"),
    [
        ([], ()),
        ([4096], (Run(0, 1, 0),)),
        ([0, 64, 128, 192], (Run(0, 4, 64),)),
        ([0, 64, 128, 448], (Run(0, 3, 64), Run(3, 1, 0))),  # group {0,1,2,3} of 8 seen from rank 1
        ([0, 64, 384, 448], (Run(0, 2, 64), Run(2, 2, 64))),
        ([0, 320, 384, 448], (Run(0, 2, 320), Run(2, 2, 64))),
        ([0, 8, 16], (Run(0, 1, 0), Run(1, 1, 0), Run(2, 1, 0))),  # not a multiple of 16 bytes
        ([0, 24, 48, 64], (Run(0, 1, 0), Run(1, 1, 0), Run(2, 2, 16))),
        ([128, 64, 0], (Run(0, 1, 0), Run(1, 1, 0), Run(2, 1, 0))),  # a tensor map cannot step back
        ([64, 64], (Run(0, 1, 0), Run(1, 1, 0))),
        ([0, 1 << 40], (Run(0, 1, 0), Run(1, 1, 0))),
        ([0, (1 << 40) - 16], (Run(0, 2, (1 << 40) - 16),)),
        ([0, 1 << 45, (1 << 45) + 32], (Run(0, 1, 0), Run(1, 2, 32))),
    ],
)
def test_runs_of_equal_stride(addresses, runs):
    assert equal_stride_runs(addresses) == runs


steps = st.sampled_from([16, 64, 4096, 8, 24, 0, -64, (1 << 40) - 16, 1 << 40, 1 << 43])


@given(st.integers(0, 1 << 45), st.lists(steps, max_size=31))
def test_runs_partition_the_chunks_and_give_their_addresses(base, deltas):
    addresses = [base]
    for delta in deltas:
        addresses.append(addresses[-1] + delta)
    rebuilt, at = [], 0
    for run in equal_stride_runs(addresses):
        assert run.start == at
        assert run.length >= 1
        assert (run.stride_bytes == 0) == (run.length == 1)
        assert 0 <= run.stride_bytes < MAX_TMA_STRIDE_BYTES
        assert run.stride_bytes % 16 == 0
        rebuilt += [addresses[run.start] + i * run.stride_bytes for i in range(run.length)]
        at += run.length
    assert rebuilt == addresses


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 700), st.sampled_from([64, 128, 192, 256]))
def test_tiles_cover_each_row_once_own_chunk_last(chunks, heads, rows, tile_rows):
    tiles = list(tile_order(chunks, heads, rows, tile_rows))
    seen = [(t.chunk, t.head, row) for t in tiles for row in range(t.row, t.row + t.rows)]
    assert len(seen) == len(set(seen)) == chunks * heads * rows
    assert max(row for _, _, row in seen) == rows - 1
    per_chunk = heads * -(-rows // tile_rows)
    assert [t.chunk for t in tiles[-per_chunk:]] == [0] * per_chunk
    assert all(1 <= t.rows <= tile_rows and t.row % tile_rows == 0 for t in tiles)
