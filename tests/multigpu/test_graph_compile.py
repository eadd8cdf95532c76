"""CUDA graphs, torch.compile, and other work on the same GPUs."""

import torch
import torch.distributed as dist
from test_fused_layer import draw, shard

from fa_a2a import UlyssesAttention


def test_case_10_graph_replays_equal_eager(device):
    size = dist.get_world_size()
    attention = UlyssesAttention(kernel="fa4", exchange="fused")
    serial = UlyssesAttention(kernel="fa4", exchange="collective")
    static = [shard(t).clone() for t in draw(device, 1, 256 * size, 2 * size, 128)]
    attention(*static)  # agreement and workspace before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*static)
    for step in range(200):
        for t, fresh in zip(static, draw(device, 1, 256 * size, 2 * size, 128, seed=step)):
            t.copy_(shard(fresh))
        graph.replay()
        got = out.clone()
        assert torch.equal(got, serial(*static)), f"replay {step}"
        if step % 50 == 7:
            assert torch.equal(attention(*static), got)  # eager between replays


def test_compile_fullgraph_with_two_equal_calls(device):
    size = dist.get_world_size()
    attention = UlyssesAttention(kernel="fa4", exchange="fused")
    parts = [shard(t).clone() for t in draw(device, 1, 192 * size, 2 * size, 128)]
    want = attention(*parts).clone()

    def twice(q, k, v):
        return attention(q, k, v) + attention(q, k, v) + attention(v, k, q)

    with torch.no_grad():
        got = torch.compile(twice, fullgraph=True)(*parts)
    assert torch.equal(got, want + want + attention(parts[2], parts[1], parts[0]))


def test_case_14_another_stream_busy(device):
    size = dist.get_world_size()
    attention = UlyssesAttention(kernel="fa4", exchange="fused", copy=True)
    serial = UlyssesAttention(kernel="fa4", exchange="collective")
    side = torch.cuda.Stream()
    a = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    for step in range(100):
        parts = [shard(t) for t in draw(device, 1, 256 * size, 2 * size, 128, seed=step)]
        want = serial(*parts)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(4):
                a.copy_(b)
        attention(*parts).fill_(float("nan"))
        assert torch.equal(attention(*parts), want), f"round {step}"


def test_calls_on_two_streams_follow_each_other(device):
    size = dist.get_world_size()
    attention = UlyssesAttention(kernel="fa4", exchange="fused", copy=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [[shard(t) for t in draw(device, 1, 256 * size, 2 * size, 128, seed=s)] for s in range(8)]
    torch.cuda.synchronize()
    outs = []
    for index, parts in enumerate(inputs):
        with torch.cuda.stream(streams[index % 2]):
            outs.append(attention(*parts))
    torch.cuda.synchronize()
    serial = UlyssesAttention(kernel="fa4", exchange="collective")
    for parts, out in zip(inputs, outs):
        assert torch.equal(serial(*parts), out)
