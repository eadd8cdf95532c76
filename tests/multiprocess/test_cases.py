"""Situations that users of sequence-parallel attention run into, one by one and numbered, on CPU processes. 7, 8, 9, 13
and 15 stand beside what they belong to (test_groups, test_numbers, test_shared_memory, test_failures); on GPUs they
have the same numbers."""

import threading

import pytest
import torch
from situations import Situation, run
from workers import attempt, coded, inputs, reference, shard

import fa_a2a
from fa_a2a import HeadShards, UlyssesAttention, attention_gather

SERIAL = {"kernel": "cpu", "exchange": "collective"}


def both_ways(rank, size, situation, lse=True):
    """Fused against serial to the bit, and both against float64; returns (exchange, reason) of the first."""
    _, exchange, reason, fused = run(situation, rank, size, UlyssesAttention(), lse)
    *_, serial = run(situation, rank, size, UlyssesAttention(**SERIAL), lse)
    assert torch.equal(fused, serial)
    if not lse:
        run(situation, rank, size, UlyssesAttention(kernel="torch"))
    return exchange, reason


def check(ranks, size, situation, exchange="fused", **options):
    for found, _ in ranks(size).run(both_ways, situation=situation, **options):
        assert found == exchange


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("text", [0, 17, -17])
def test_case_01_sequence_not_divisible(ranks, size, text):
    check(ranks, size, Situation(seq=80 - abs(text), heads=max(4, size), text=text, sizes="split"))


def test_case_02_prompts_of_different_lengths(ranks):
    check(ranks, 2, Situation(batch=2, seq=34, key_lengths=(30, 21)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_case_03_whole_keys_on_every_rank(ranks, size):
    for exchange, reason in ranks(size).run(
        both_ways, situation=Situation(seq=64, heads=max(4, size), kv_rows=769), lse=False
    ):
        assert (exchange, reason) == ("collective", "k and v are whole on every rank: nothing is exchanged")


def rows_that_change(rank, size, exchange):
    layer = UlyssesAttention(kernel="cpu", exchange=exchange, copy=True)
    held = set()
    for call in range(50):
        sizes = ((9, 8), (8, 8), (9, 9))[call % 3]
        case = Situation(seq=sum(sizes), sizes=sizes, dim=16, seed=call)
        out = layer(*case.shards(rank, size), **case.options(size))
        assert (out.double() - case.mine(case.reference()[0], rank, size)).abs().max() < 1e-5
        if call > 3:
            held.add(sum(fa_a2a.memory_bytes().values()))
    return len(held)


@pytest.mark.parametrize("exchange", ["fused", "collective"])
def test_case_04_shard_sizes_that_change(ranks, exchange):
    assert set(ranks(2).run(rows_that_change, exchange=exchange)) == {1}


@pytest.mark.parametrize(
    ("heads", "size", "dim", "seq"), [(30, 4, 128, 96), (30, 8, 128, 96), (12, 8, 64, 64), (18, 4, 64, 64)]
)
def test_case_05_heads_not_divisible(ranks, heads, size, dim, seq):
    case = Situation(heads=heads, dim=dim, seq=seq)
    check(ranks, size, case, lse=False)
    counts = list(map(len, case.shape(size).head_ranges))
    assert sum(counts) == heads and max(counts) - min(counts) == 1, "no padding on the wire"


@pytest.mark.parametrize("size", [4, 8])
def test_case_06_rows_that_do_not_fill_a_tile(ranks, size):
    check(ranks, size, Situation(seq=902, heads=8, sizes="split"), lse=False)


def replays(rank, size):
    """One compiled graph, called with changing inputs, and eager calls of the same module in between."""
    torch._dynamo.reset()
    layer = UlyssesAttention(kernel="cpu", exchange="fused")
    eager = UlyssesAttention(kernel="cpu", exchange="fused")
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for step in range(200):
        parts = inputs(rank, size, seed=step)
        out = fast(*parts)
        if step % 20 == 7 or step < 2:
            assert torch.equal(eager(*parts), out), f"call {step}"
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_case_10_one_graph_many_inputs(ranks):
    """CUDA graphs need a GPU (tests/multigpu); on CPU processes the graph is torch.compile's."""
    torch._dynamo.utils.counters.clear()
    ranks(2).run(replays)


@pytest.mark.parametrize(("kernel", "exchange"), [("cpu", "fused"), ("cpu", "collective"), ("torch", "collective")])
def test_case_11_padded_keys_at_the_end(ranks, kernel, exchange):
    case = Situation(seq=256, key_lengths=(243,))
    ranks(2).run(masked, kernel=kernel, exchange=exchange, case=case)


def masked(rank, size, kernel, exchange, case):
    run(case, rank, size, UlyssesAttention(kernel=kernel, exchange=exchange))
    layer = UlyssesAttention(kernel=kernel, exchange=exchange, copy=True)
    q, k, v = case.shards(rank, size)
    out = layer(q, k, v, key_lengths=[243])
    if rank == size - 1:  # whatever lies in the padding takes no part
        k[:, -13:], v[:, -13:] = float("nan"), float("inf")
    assert torch.equal(layer(q, k, v, key_lengths=[243]), out)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(40, 8, 8), (28, 4, 8), (12, 6, 4), (8, 1, 3), (10, 5, 3)])
def test_case_12_grouped_queries(ranks, heads, kv_heads, size):
    check(ranks, size, Situation(heads=heads, kv_heads=kv_heads, dim=32, seq=size * 7))


def beside_copies(rank, size):
    """A thread that copies 64 MiB over and over, while the layer runs."""
    a, stop = torch.zeros(64 << 20, dtype=torch.uint8), threading.Event()
    b = torch.empty_like(a)

    def copy():
        while not stop.wait(0.01):
            b.copy_(a)

    busy = threading.Thread(target=copy)
    busy.start()
    try:
        fused, serial = UlyssesAttention(kernel="cpu", exchange="fused"), UlyssesAttention(**SERIAL)
        fused(*inputs(rank, size)).fill_(float("nan"))
        for step in range(100):
            parts = inputs(rank, size, seed=step)
            out = fused(*parts)
            assert torch.equal(out, serial(*parts)), f"round {step}"
            out.fill_(float("nan"))
    finally:
        stop.set()
        busy.join()


def test_case_14_memory_busy(ranks):
    ranks(2).run(beside_copies)


def another_host(rank, size):
    """Rank 1 believes that it runs elsewhere."""
    import platform

    if rank == 1:
        platform.node = lambda: "elsewhere"
    whole = coded(1, 8 * size, 4, 16, torch.float32)
    parts = [shard(t, rank, size) for t in whole]
    layer = UlyssesAttention()
    told = []
    fa_a2a.ops.plan.log.warning = lambda *text: told.append(text)
    for _ in range(3):
        out = layer(*parts)
        assert (out.double() - shard(reference(*whole), rank, size)).abs().max() < 1e-5
    named = attempt(UlyssesAttention(exchange="fused"), *parts)
    return layer.last_plan.exchange, layer.last_plan.reason, len(told), named


def test_case_16_another_host_in_the_group(fresh_ranks):
    for exchange, reason, told, named in fresh_ranks(2).run(another_host):
        assert exchange == "collective"
        assert "falls back to 'collective'" in reason and "ranks [1] are on another" in reason
        assert told == 1
        assert named.error == "UnsupportedError"


def wrapped(rank, size, exchange):
    """Tensors that are head-sharded already, with unequal shards, text and padded keys."""
    case = Situation(2, 37, 2 * size, size, 16, "float32", "split", -5, (30, 42))
    q, k, v = case.whole()
    mine = [q[:, :, 2 * rank : 2 * rank + 2], k[:, :, rank : rank + 1], v[:, :, rank : rank + 1]]
    options = case.options(size) | {"kernel": "cpu", "exchange": exchange, "return_lse": True}
    out, lse = attention_gather(HeadShards.from_tensors(*mine, **options))
    want, want_lse = case.reference()
    assert (out.double() - case.mine(want, rank, size)).abs().max() < 1e-5
    assert (lse.double() - case.mine(want_lse, rank, size, dim=2)).abs().max() < 1e-5
    uneven = attempt(HeadShards.from_tensors, q, k[:, :, :1], v[:, :, :1], shard_sizes=[30, 13])
    return uneven.error, uneven.text


@pytest.mark.parametrize("exchange", ["fused", "collective"])
def test_head_sharded_tensors_with_options(ranks, exchange):
    for error, text in ranks(2).run(wrapped, exchange=exchange):
        assert (error, "must sum to q's rows" in text) == ("ShapeError", True)


def compiled(rank, size):
    torch._dynamo.reset()
    found = []
    for case in (
        Situation(seq=33, sizes="split", dim=16),
        Situation(seq=32, text=5, dim=16, key_lengths=(30,)),
        Situation(seq=32, heads=6, kv_heads=2, dim=16, causal=True),
        Situation(seq=32, kv_rows=11, dim=16),
    ):
        layer = UlyssesAttention(kernel="cpu")
        parts, options = case.shards(rank, size), case.options(size)
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        found.append(torch.equal(fast(*parts, **options), layer(*parts, **options)))
    return found


def test_compiled_with_every_option(ranks):
    assert ranks(2).run(compiled) == [[True] * 4] * 2
