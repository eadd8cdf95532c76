"""torch.compile over real ranks."""

import pytest
import torch
from workers import forget, inputs

import fa_a2a
from fa_a2a import UlyssesAttention


class Block(torch.nn.Module):
    """Two identical calls and some arithmetic around them."""

    def __init__(self, **options):
        super().__init__()
        self.attention = UlyssesAttention(kernel="cpu", **options)

    def forward(self, q, k, v):
        first = self.attention(q, k, v)
        second = self.attention(q, k, v)
        third, lse = self.attention(q + 1, k, v, scale=0.3, return_lse=True)
        return first + 2 * second, third, lse


def compiled(rank, size, backend, exchange, eager_first):
    torch._dynamo.reset()
    fa_a2a.close()
    block = Block(exchange=exchange)
    q, k, v = inputs(rank, size)
    eager = UlyssesAttention(kernel="cpu", exchange="fused", copy=True)

    def want(q, k, v):
        first = eager(q, k, v)
        return first + 2 * first, *eager(q + 1, k, v, scale=0.3, return_lse=True)

    if eager_first:
        block(q, k, v)
    fast = torch.compile(block, fullgraph=True, backend=backend)
    got = fast(q, k, v)
    expected = want(q, k, v)
    again = fast(*inputs(rank, size, seed=1))
    return [torch.allclose(a, b, atol=1e-6) for a, b in zip(got, expected)], [
        torch.allclose(a, b, atol=1e-6) for a, b in zip(again, want(*inputs(rank, size, seed=1)))
    ]


@pytest.mark.parametrize(
    ("size", "exchange", "eager_first"),
    [(2, "fused", False), (2, "fused", True), (2, "collective", False), (2, "collective", True), (8, "fused", False)],
)
def test_two_identical_calls_in_one_graph(ranks, size, exchange, eager_first):
    for results in ranks(size).run(compiled, backend="aot_eager", exchange=exchange, eager_first=eager_first):
        assert results == ([True] * 3, [True] * 3)


def test_inductor_keeps_the_calls_whole(ranks):
    for results in ranks(2).run(compiled, backend="inductor", exchange="fused", eager_first=False):
        assert results == ([True] * 3, [True] * 3)


def changing_shapes(rank, size, dynamic):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = UlyssesAttention(kernel="cpu", exchange="fused")
    eager = UlyssesAttention(kernel="cpu", exchange="fused", copy=True)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    kept = []
    for rows in (8, 12, 20, 9):
        q, k, v = inputs(rank, size, rows=rows)
        kept.append((fast(q, k, v), eager(q, k, v)))
    # all outputs at the end: a compiled call returns ordinary tensors
    return all(torch.equal(a, b) for a, b in kept), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("dynamic", "most_graphs"), [(None, 2), (True, 1), (False, 4)])
def test_shapes_that_change_recompile_and_stay_right(ranks, dynamic, most_graphs):
    for equal, graphs in ranks(2).run(changing_shapes, dynamic=dynamic):
        assert equal
        assert 1 <= graphs <= most_graphs
    ranks(2).run(forget)
