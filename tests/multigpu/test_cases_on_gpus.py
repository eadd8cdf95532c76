"""Situations that users of sequence-parallel attention run into, on GPUs, numbered as in the multiprocess tier's
test_cases.py. 7, 9, 10 and 14 stand in test_groups_errors, test_fused_layer and test_graph_compile."""

import pytest
import torch
import torch.distributed as dist
from situations import Situation, run

import fa_a2a
from fa_a2a import UlyssesAttention
from fa_a2a.errors import PeerMismatchError
from fa_a2a.ops import kernels

HALF = Situation(dtype="bfloat16", heads=12)  # for 8 ranks, too


@pytest.fixture(params=["fa4", "fa3"])
def fused_kernel(request):
    return request.param


def both_ways(device, situation, kernel):
    """Fused against serial to the bit, and both against float32 attention."""
    dtype = getattr(torch, situation.dtype)
    if trouble := kernels.problem(kernel, device, dtype, situation.dim, True, situation.causal):
        pytest.skip(trouble)
    size, rank = dist.get_world_size(), dist.get_rank()
    paths = [UlyssesAttention(kernel=kernel, exchange=exchange) for exchange in ("fused", "collective")]
    (_, taken, _, fused), (*_, serial) = (run(situation, rank, size, layer, True, device) for layer in paths)
    assert torch.equal(fused, serial)
    return taken


@pytest.mark.parametrize("text", [0, 512, -512])
def test_case_01_sequence_not_divisible(device, fused_kernel, text):
    case = HALF.on(heads=24, dim=128, seq=3969 + (0 if text else 512), text=text, sizes="split")
    assert both_ways(device, case, fused_kernel) == "fused"


def test_case_01_any_sizes(device, fused_kernel):
    sizes = tuple(100 + 37 * r for r in range(dist.get_world_size()))
    assert both_ways(device, HALF.on(heads=8, batch=2, seq=sum(sizes), sizes=sizes), fused_kernel) == "fused"


def test_case_02_prompts_of_different_lengths(device, fused_kernel):
    lengths = (30, 21)
    assert (
        both_ways(device, HALF.on(batch=2, seq=17 * dist.get_world_size(), key_lengths=lengths), fused_kernel)
        == "fused"
    )


@pytest.mark.parametrize("kernel", ["fa4", "torch"])
def test_case_03_whole_keys_on_every_rank(device, kernel):
    size, case = dist.get_world_size(), HALF.on(seq=64, kv_rows=769)
    lse = kernel == "fa4"
    _, _, reason, _ = run(case, dist.get_rank(), size, UlyssesAttention(kernel=kernel), lse, device)
    assert reason == "k and v are whole on every rank: nothing is exchanged"
    assert not any(fa_a2a.memory_bytes().values())


def test_case_04_shard_sizes_that_change(device):
    size, rank, held = dist.get_world_size(), dist.get_rank(), set()
    layer, serial = (UlyssesAttention(kernel="fa4", exchange=e, copy=True) for e in ("fused", "collective"))
    for call in range(50):
        first, others = ((9, 8), (8, 8), (9, 9))[call % 3]
        sizes = (first, *(size - 1) * (others,))
        case = HALF.on(seq=sum(sizes), sizes=sizes, seed=call)
        parts, options = case.shards(rank, size, device), case.options(size)
        assert torch.equal(layer(*parts, **options), serial(*parts, **options)), f"call {call}"
        if call > 3:
            held.add(sum(fa_a2a.memory_bytes().values()))
    assert len(held) == 1


@pytest.mark.parametrize("heads", [12, 18, 30, 31])
def test_case_05_heads_not_divisible(device, fused_kernel, heads):
    assert both_ways(device, HALF.on(heads=heads, dim=128, seq=64 * 24), fused_kernel) == "fused"


def test_case_06_rows_that_do_not_fill_a_tile(device, fused_kernel):
    assert both_ways(device, HALF.on(heads=48, seq=902, sizes="split"), fused_kernel) == "fused"


def test_case_08_lse(device, fused_kernel):
    size = dist.get_world_size()
    assert both_ways(device, Situation(heads=size, dim=128, seq=8 * size, dtype="float16"), fused_kernel) == "fused"


def test_case_11_padded_keys_at_the_end(device, fused_kernel):
    size, rank = dist.get_world_size(), dist.get_rank()
    case = HALF.on(seq=64 * size, key_lengths=(64 * size - 13,))
    assert both_ways(device, case, fused_kernel) == "fused"
    layer = UlyssesAttention(kernel="fa4", exchange="fused", copy=True)
    q, k, v = case.shards(rank, size, device)
    out = layer(q, k, v, key_lengths=case.key_lengths)
    if rank == size - 1:  # whatever lies in the padding takes no part
        k[:, -13:], v[:, -13:] = float("nan"), float("inf")
    assert torch.equal(layer(q, k, v, key_lengths=case.key_lengths), out)


@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 8), (28, 4), (12, 1), (10, 5)])
def test_case_12_grouped_queries(device, fused_kernel, heads, kv_heads):
    assert both_ways(device, HALF.on(heads=heads, kv_heads=kv_heads, dim=128, seq=60 * 24), fused_kernel) == "fused"


WRONG = {
    "rows": lambda q, k, v: ([t[:, :-1] for t in (q, k, v)], {}),
    "dtype": lambda q, k, v: ([t.half() for t in (q, k, v)], {}),
    "heads": lambda q, k, v: ([t[:, :, :-1] for t in (q, k, v)], {}),
    "shard_sizes": lambda q, k, v: ((q, k, v), {"shard_sizes": [q.shape[1]] * (dist.get_world_size() + 1)}),
    "key_lengths": lambda q, k, v: ((q, k, v), {"key_lengths": [5]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_case_13_one_rank_wrong(device, fused_kernel, name):
    size, rank = dist.get_world_size(), dist.get_rank()
    parts, options = HALF.on(seq=64 * size).shards(rank, size, device), {}
    if rank == 1:
        parts, options = WRONG[name](*parts)
    with pytest.raises(PeerMismatchError):
        UlyssesAttention(kernel="fa4", exchange="fused")(*parts, **options)
    assert both_ways(device, HALF.on(seq=64 * size), fused_kernel) == "fused"


def test_graph_of_unequal_shards_replayed(device):
    size, rank = dist.get_world_size(), dist.get_rank()
    case = HALF.on(heads=2 * size + 1, seq=64 * size + 1, sizes="split", text=9, dim=128)
    layer, serial = (UlyssesAttention(kernel="fa4", exchange=e) for e in ("fused", "collective"))
    static, options = case.shards(rank, size, device), case.options(size)
    layer(*static, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*static, **options)
    for step in range(30):
        for t, fresh in zip(static, case.on(seed=step).shards(rank, size, device)):
            t.copy_(fresh)
        graph.replay()
        assert torch.equal(out.clone(), serial(*static, **options)), f"replay {step}"
