"""Every row of the README's list of shapes, on the path that it names; and any shape at all."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from situations import Situation, run

from fa_a2a import UlyssesAttention
from fa_a2a.bench.support import SUPPORT


def taken(rank, size, situation):
    return [run(situation, rank, size, UlyssesAttention(), lse=True)[1]]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("row", SUPPORT, ids=lambda row: row.what)
def test_row_takes_the_path_that_the_readme_names(ranks, size, row):
    heads = max(row.call["heads"] // 2, row.call.get("kv_heads", 0), size)
    situation = Situation(**{**row.call, "heads": heads})
    assert ranks(size).run(taken, situation=situation) == [[row.exchange]] * size


@st.composite
def situations(draw):
    """Anything that the layer takes, with the number of ranks and the exchange."""
    size = draw(st.sampled_from([2, 3, 4, 8]))
    kv_heads = draw(st.integers(1, 6))
    fewest = -(-size // kv_heads)
    heads = kv_heads * draw(st.integers(fewest, max(6, fewest)))
    sizes = draw(st.sampled_from(["equal", "split", "any"]))
    if sizes == "any":
        sizes = tuple(draw(st.integers(1, 90)) for _ in range(size))
        seq = sum(sizes)
    else:
        seq = draw(st.integers(size, 70 * size))
        seq -= seq % size if sizes == "equal" else 0
    text, batch = draw(st.sampled_from([0, 0, 1, 5, -3, -70])), draw(st.integers(1, 3))
    lengths = draw(st.none() | st.lists(st.integers(1, seq + abs(text)), min_size=batch, max_size=batch).map(tuple))
    case = Situation(
        batch, seq, heads, kv_heads, draw(st.sampled_from([8, 16, 64, 96])),
        draw(st.sampled_from(["float32", "bfloat16", "float16"])), sizes, text, lengths, draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3])), seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    if draw(st.integers(0, 5)) == 0:
        rows = draw(st.integers(1, 100))
        lengths = None if lengths is None else tuple(min(n, rows) for n in lengths)
        case = case.on(text=0, causal=False, kv_rows=rows, key_lengths=lengths)
    return size, case, draw(st.sampled_from([{"exchange": "fused"}, {"exchange": "collective"}, {"kernel": "torch"}]))


def one(rank, size, case, options):
    lse = options.get("kernel") != "torch"
    layer = UlyssesAttention(timeout_s=20, **({"kernel": "cpu", **options}))
    run(case, rank, size, layer, lse)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(situations())
def test_any_shape_equals_attention_in_one_process(ranks, drawn):
    size, case, options = drawn
    ranks(size).run(one, case=case, options=options)
