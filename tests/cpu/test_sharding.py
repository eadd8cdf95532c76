"""Which rows and heads a rank holds: every row and head once, shares that differ by one at most."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa_a2a.layout import ExchangeShape
from fa_a2a.sharding import even_split, split_heads


@given(st.integers(0, 5000), st.integers(1, 32))
def test_even_split_is_tensor_splits(count, parts):
    assert even_split(count, parts) == tuple(len(part) for part in torch.arange(count).tensor_split(parts))


@given(st.integers(1, 32), st.integers(1, 16), st.data())
def test_heads_are_shared_out_once_and_evenly(ranks, kv_heads, data):
    heads = kv_heads * data.draw(st.integers(-(-ranks // kv_heads), 40))
    shares = split_heads(heads, kv_heads, ranks)
    assert [h for share in shares for h in share] == list(range(heads))
    sizes = list(map(len, shares))
    assert max(sizes) == -(-heads // ranks), "no rank computes more than it must"
    assert min(sizes) >= 1
    if ranks % kv_heads:
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 8), st.integers(1, 12), st.data())
def test_every_query_head_finds_its_own_key_head(ranks, kv_heads, data):
    group = data.draw(st.integers(-(-ranks // kv_heads), 9))
    shape = ExchangeShape(1, ranks, kv_heads * group, 8, ranks, 2, kv_heads)
    for rank, (heads, kv) in enumerate(zip(shape.head_ranges, shape.kv_ranges)):
        found = {}
        for mine, shared in shape.kv_runs(rank):
            for head in heads[mine]:
                found[head] = kv[shared]
        assert {h: range(h // group, h // group + 1) for h in heads} == found
        assert len(heads) <= shape.local_heads and len(kv) <= shape.local_kv_heads


@st.composite
def shapes(draw):
    ranks = draw(st.integers(1, 8))
    sizes = tuple(draw(st.integers(1, 50)) for _ in range(ranks))
    text = draw(st.integers(-20, 20))
    return ExchangeShape(2, sum(sizes) + abs(text), 3 * ranks + draw(st.integers(0, 5)), 8, ranks, 2, 0, sizes, text)


@given(shapes())
def test_rows_are_held_once_and_text_by_all(shape):
    text = set(range(*shape.text[:1], sum(shape.text))) if shape.text else set()
    own = []
    for rank in range(shape.num_ranks):
        held = [row for first, rows in shape.spans(rank) for row in range(first, first + rows)]
        assert len(held) == shape.rows(rank) <= shape.local_seq
        assert text <= set(held)
        assert [held[i] for i in range(shape.rows(rank))[shape.text_place(rank)]] == sorted(text)
        own += [held[i] for i in range(shape.rows(rank))[shape.own_rows(rank)]]
        first, rows = shape.shards[rank]
        assert own[-rows:] == list(range(first, first + rows))
    assert own == [row for row in range(shape.seq_len) if row not in text]
    assert shape.text_rows <= 0 or not text or min(text) == 0
    assert shape.text_rows >= 0 or not text or max(text) == shape.seq_len - 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "sizes", "kv"),
    [
        (30, 30, 4, [8, 8, 7, 7], [8, 8, 7, 7]),
        (40, 8, 8, [5] * 8, [1] * 8),
        (28, 4, 8, [4, 3] * 4, [1] * 8),
        (12, 6, 4, [3] * 4, [2] * 4),
        (8, 1, 3, [3, 3, 2], [1] * 3),
    ],
)
def test_known_shares(heads, kv_heads, ranks, sizes, kv):
    shape = ExchangeShape(1, ranks, heads, 8, ranks, 2, kv_heads)
    assert list(map(len, shape.head_ranges)) == sizes
    assert list(map(len, shape.kv_ranges)) == kv


@given(shapes())
def test_buffers_hold_what_any_rank_needs(shape):
    for rank in range(shape.num_ranks):
        row = shape.batch * shape.head_dim * shape.itemsize
        assert shape.num_ranks * shape.local_seq * len(shape.head_ranges[rank]) * row <= shape.tensor_bytes
        assert shape.local_seq * shape.num_heads * row <= shape.tensor_bytes
        assert shape.seq_len * len(shape.kv_ranges[rank]) * row <= shape.kv_bytes
