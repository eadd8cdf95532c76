"""Where a call writes and how it counts: canaries in every rank's workspace, call numbers that wrap, and calls from
several streams, threads and groups."""

import threading

import pytest
import torch
import torch.distributed as dist
from test_fused_layer import draw, shard

import fa_a2a
from fa_a2a import UlyssesAttention, config
from fa_a2a.comm import workspace
from fa_a2a.comm.group import resolve
from fa_a2a.layout import BUFFER_NAMES

FUSED = {"kernel": "fa4", "exchange": "fused"}
ODD = [(1, 1, 1, 128), (1, 7, 3, 64), (2, 63, 1, 128), (1, 127, 2, 64), (3, 129, 1, 128), (1, 321, 3, 64)]


def serial(parts, **options):
    return UlyssesAttention(kernel="fa4", exchange="collective", copy=True)(*parts, **options)


@pytest.mark.parametrize("with_lse", [False, True])
def test_nothing_is_written_where_it_does_not_belong(device, with_lse):
    size, rank = dist.get_world_size(), dist.get_rank()
    layer = UlyssesAttention(**FUSED)
    layer(*(shard(t) for t in draw(device, 3, 400 * size, 4 * size, 128)))
    space = resolve(None).workspace
    at, own = space.map, space.block.peers[rank]
    guards = torch.zeros(own.numel(), dtype=torch.bool, device=device)
    for offset, nbytes in at.guards():
        guards[offset : offset + nbytes] = True
    for batch, rows, heads, dim in ODD:
        parts = [shard(t).clone() for t in draw(device, batch, rows * size, heads * size, dim, seed=rows)]
        want = serial(parts)
        layer(*parts, return_lse=with_lse)
        torch.cuda.synchronize()
        dist.barrier()
        canaries = torch.full_like(own, 0x5C)
        canaries[guards] = own[guards]
        for name in ("o", "lse"):
            canaries[at.offset(name) : at.offset(name) + at.capacity(name)] = 0xFF  # NaN
        own.copy_(canaries)
        torch.cuda.synchronize()
        dist.barrier()
        result = layer(*parts, return_lse=with_lse)
        torch.cuda.synchronize()
        dist.barrier()
        out = result[0] if with_lse else result
        assert torch.equal(out, want)
        written = own != canaries
        for name in BUFFER_NAMES:
            used = batch * heads * size * rows * (4 if name == "lse" else dim * 2)
            if name != "lse" or with_lse:
                written[at.offset(name) : at.offset(name) + used] = False
        assert int(written.sum()) == 0, (batch, rows, heads, dim)


@pytest.mark.parametrize("start", [(1 << 32) - 3, (1 << 63) - 3, (1 << 64) - 3], ids=["32_bits", "sign", "64_bits"])
def test_call_numbers_wrap(device, monkeypatch, start):
    monkeypatch.setattr(workspace, "_FIRST_EPOCH", start)
    layer, size = UlyssesAttention(**FUSED), dist.get_world_size()
    sets = [[shard(t).clone() for t in draw(device, 1, 100 * size, 2 * size, 128, seed=s)] for s in range(3)]
    wants = [serial(parts) for parts in sets]
    layer(*sets[0])
    graph = torch.cuda.CUDAGraph()
    static = [t.clone() for t in sets[0]]
    with torch.cuda.graph(graph):
        captured = layer(*static)
    for number in range(6):
        torch._foreach_copy_(static, sets[number % 3])
        if number % size == dist.get_rank():
            torch.cuda._sleep(3_000_000)
        if number % 2:
            graph.replay()
            out = captured
        else:
            out = layer(*static)
        assert torch.equal(out, wants[number % 3]), number
    words = resolve(None).workspace.memory.words(resolve(None).workspace.signals)
    assert words[0] == (start + 7) % (1 << 64)


def test_two_streams_in_turn(device):
    layer, size = UlyssesAttention(**FUSED), dist.get_world_size()
    sets = [[shard(t).clone() for t in draw(device, 1, 300 * size, 2 * size, 128, seed=s)] for s in range(4)]
    wants = [serial(parts) for parts in sets]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize()
    kept, wrong = [torch.empty_like(w) for w in wants], 0
    for turn in range(200):
        with torch.cuda.stream(streams[turn % 2]):
            if (turn + dist.get_rank()) % 3 == 0:
                torch.cuda._sleep(100_000)
            kept[turn % 4].copy_(layer(*sets[turn % 4]))
        if turn % 4 == 3:
            torch.cuda.synchronize()
            wrong += sum(not torch.equal(got, want) for got, want in zip(kept, wants))
            for t in kept:
                t.zero_()
            torch.cuda.synchronize()
    assert wrong == 0


def test_two_threads_on_two_groups(device):
    """Each thread with a stream of its own, so that kernels of both groups are on the GPU together."""
    size = dist.get_world_size()
    if config.share_gpu() and size > 4:
        pytest.skip("of 8 ranks on one GPU a waiting kernel once kept the other group's from starting for 20 s")
    groups = [dist.group.WORLD, dist.new_group(list(range(size)))]
    sets = [
        [[shard(t).clone() for t in draw(device, 1, (200 + 57 * g) * size, 2 * size, 128, seed=s)] for s in range(3)]
        for g in range(2)
    ]
    wants = [[serial(parts) for parts in mine] for mine in sets]
    layers = [UlyssesAttention(group, **FUSED, timeout_s=20) for group in groups]
    for layer, mine in zip(layers, sets):  # set-up is collective: in one order on every rank
        layer(*mine[0])
    torch.cuda.synchronize()
    wrong = [0, 0]

    def work(index):
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            count = torch.zeros((), dtype=torch.int64, device=device)
            for turn in range(300):
                count += (layers[index](*sets[index][turn % 3]) != wants[index][turn % 3]).any()
            wrong[index] = int(count)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fa_a2a.close(groups[1])
    assert wrong == [0, 0]


def test_an_error_of_the_host_gives_the_memory_back(device):
    """A call that one rank cannot begin poisons the group; the next workspace frees what that left."""
    from fa_a2a.comm.nvshmem_world import WORLD

    layer, size = UlyssesAttention(**FUSED), dist.get_world_size()
    parts = [shard(t).clone() for t in draw(device, 1, 128 * size, 2 * size, 128)]
    want = serial(parts)
    before = len(WORLD.left)
    for _ in range(3):
        assert torch.equal(layer(*parts), want)
        torch.cuda.synchronize()
        dist.barrier()
        resolve(None).poisoned = "an error on this rank"
        fa_a2a.close()
        assert len(WORLD.left) == before + 1
    assert torch.equal(layer(*parts), want)
    assert len(WORLD.left) == before
