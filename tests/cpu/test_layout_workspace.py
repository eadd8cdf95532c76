"""Shapes of a call, the byte map of a workspace, epochs, and fingerprints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_a2a import layout
from fa_a2a.errors import ShapeError
from fa_a2a.layout import ALIGN_BYTES, BUFFER_NAMES, GUARD_BYTES, ExchangeShape, WorkspaceMap, signed_difference

SMALL = ExchangeShape(batch=1, seq_len=16, num_heads=4, head_dim=8, num_ranks=2, itemsize=2)


def test_shape_counts():
    shape = ExchangeShape(batch=2, seq_len=48, num_heads=12, head_dim=64, num_ranks=4, itemsize=2)
    assert (shape.local_seq, shape.local_heads) == (12, 3)
    assert shape.tensor_bytes == 2 * 48 * 3 * 64 * 2 == 2 * 12 * 12 * 64 * 2
    assert shape.lse_bytes == 2 * 12 * 12 * 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seq_len": 17}, r"shards are equal unless.*17 tokens over 2 ranks; pass shard_sizes=\[9, 8\]"),
        ({"seq_len": 17, "shard_sizes": (9, 9)}, r"2 positive numbers that sum to 17 tokens, got \[9, 9\]"),
        ({"seq_len": 17, "shard_sizes": (17, 0)}, "every rank must hold at least one token"),
        ({"seq_len": 17, "shard_sizes": (9, 8), "text_rows": 1}, "sum to 16 tokens"),
        ({"num_heads": 1}, "at least one head: 1 heads over 2 ranks"),
        ({"num_kv_heads": 3}, "multiple of the key heads, got 4 and 3"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"head_dim": -8}, "head_dim must be at least 1, got -8"),
        ({"num_ranks": 33, "seq_len": 33, "num_heads": 33}, "at most 32 ranks, got 33"),
    ],
)
def test_shape_refuses(change, text):
    fields = {"batch": 1, "seq_len": 16, "num_heads": 4, "head_dim": 8, "num_ranks": 2, "itemsize": 2}
    with pytest.raises(ShapeError, match=text):
        ExchangeShape(**{**fields, **change})


shapes = st.builds(
    lambda b, s, h, d, p, i: ExchangeShape(b, s * p, h * p, d, p, i),
    st.integers(1, 3),
    st.integers(1, 500),
    st.integers(1, 5),
    st.sampled_from([8, 64, 128]),
    st.integers(1, 32),
    st.sampled_from([2, 4]),
)


@given(st.lists(shapes, min_size=1, max_size=5))
def test_buffers_and_guards_tile_the_block_without_overlap(calls):
    at = WorkspaceMap()
    for shape in calls:
        at = at.grown(shape)
    regions = [(at.offset(name), at.capacity(name)) for name in BUFFER_NAMES] + list(at.guards())
    end = 0
    for offset, nbytes in sorted(regions):
        assert offset == end
        end = offset + nbytes
    assert end == at.total_bytes
    assert len(at.guards()) == len(BUFFER_NAMES) + 1
    assert all(nbytes >= GUARD_BYTES for _, nbytes in at.guards())
    assert all(at.offset(name) % ALIGN_BYTES == 0 for name in BUFFER_NAMES)


@given(st.lists(shapes, min_size=1, max_size=8))
def test_map_only_grows_and_holds_every_call(calls):
    at = WorkspaceMap()
    for shape in calls:
        before, at = at, at.grown(shape)
        assert at.tensor_bytes >= max(before.tensor_bytes, shape.tensor_bytes)
        assert at.lse_bytes >= max(before.lse_bytes, shape.lse_bytes)
    assert all(at.grown(shape) == at for shape in calls)
    assert at.tensor_bytes < max(s.tensor_bytes for s in calls) + ALIGN_BYTES
    assert at.lse_bytes < max(s.lse_bytes for s in calls) + ALIGN_BYTES


def test_map_of_one_small_call():
    at = WorkspaceMap().grown(SMALL)
    assert (at.tensor_bytes, at.lse_bytes) == (1024, 1024)
    assert [at.offset(name) for name in BUFFER_NAMES] == [1024, 3072, 5120, 7168, 9216]
    assert at.total_bytes == 11 * 1024


def test_signal_words_lie_apart_and_inside_the_block():
    n = layout.MAX_RANKS
    words = [layout.EPOCH_WORD, layout.TOLD_WORD]
    for first in (layout.ARRIVED_WORD, layout.FINGERPRINT_WORD, layout.READY_WORD):
        words += range(first, first + n)
    words += range(layout.PARTS_WORD, layout.PARTS_WORD + n * layout.MAX_PARTS)
    assert len(words) == len(set(words))
    assert max(words) < layout.SIGNAL_WORDS
    assert layout.SIGNAL_BYTES == 8 * layout.SIGNAL_WORDS


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        (5, 3, 2),
        (3, 5, -2),
        (1 << 63, (1 << 63) - 1, 1),
        ((1 << 63) - 1, 1 << 63, -1),
        (0, (1 << 64) - 1, 1),
        ((1 << 64) - 1, 0, -1),
        (1, (1 << 64) - 2, 3),
        (1 << 63, 0, -(1 << 63)),
    ],
)
def test_signed_difference(a, b, difference):
    assert signed_difference(a, b) == difference


@given(st.integers(0, (1 << 64) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
def test_signed_difference_undoes_wrapping_addition(b, step):
    assert signed_difference((b + step) % (1 << 64), b) == step


@given(
    st.sampled_from(layout.Reason), st.integers(0, 31), st.integers(0, 31), st.integers(0, 2**64 - 1), st.integers(0, 1)
)
def test_a_notice_ends_the_waits_from_its_step_on_and_no_earlier_ones(reason, rank, missing, arrived, behind):
    ready = arrived - behind
    notice = layout.Notice(reason, rank, missing, layout.next_step(arrived, ready))
    assert 0 < notice.packed() < 1 << 64
    found = layout.Notice.unpacked(notice.packed())
    assert (found.reason, found.rank, found.missing) == (reason, rank, missing)
    # behind: this rank has published `arrived` of a call, and not yet its `ready`
    assert [found.ends(layout.Word.ARRIVED, arrived), found.ends(layout.Word.READY, arrived)] == [False, bool(behind)]
    for later in (1, 2, 1000):
        assert found.ends(layout.Word.ARRIVED, arrived + later)
        assert found.ends(layout.Word.READY, arrived + later)
    assert not found.ends(layout.Word.READY, ready)
    assert layout.Notice.unpacked(0) is None


@given(st.text(), st.text())
def test_fingerprints_are_63_bit_never_zero_and_tell_texts_apart(a, b):
    assert 0 < layout.fingerprint(a) < 1 << 63
    assert (layout.fingerprint(a) == layout.fingerprint(b)) == (a == b)


def test_fingerprint_is_the_same_in_every_process():
    assert layout.fingerprint("batch=1") == 0x604C8E4B5E9DECBB
