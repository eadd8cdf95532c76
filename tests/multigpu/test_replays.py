"""Ten thousand replays of CUDA graphs, every one checked on the device: the host only enqueues."""

import pytest
import torch
import torch.distributed as dist
from test_fused_layer import draw, shard

from fa_a2a import UlyssesAttention

REPLAYS = 10_000
SETS = 3  # inputs that follow each other, so that a stale tile shows


@pytest.mark.parametrize("calls", [1, 2, 3], ids=lambda n: f"{n}_calls_in_a_graph")
def test_ten_thousand_replays_are_bitwise_right(device, calls):
    size = dist.get_world_size()
    attention = UlyssesAttention(kernel="fa4", exchange="fused")
    serial = UlyssesAttention(kernel="fa4", exchange="collective", copy=True)
    sets = [[shard(t).clone() for t in draw(device, 1, 256 * size, 3 * size, 128, seed=s)] for s in range(SETS)]
    wants = [serial(*parts) for parts in sets]
    static = [[t.clone() for t in parts] for parts in sets[:1] * calls]
    attention(*static[0])
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    seen = [torch.empty_like(wants[0]) for _ in range(calls)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for parts, kept in zip(static, seen):  # back to back on one stream, each output used before the next call
            kept.copy_(attention(*parts))
    for replay in range(REPLAYS // calls):
        for call, parts in enumerate(static):
            torch._foreach_copy_(parts, sets[(replay + call) % SETS])
        for kept in seen:
            kept.fill_(float("nan"))
        graph.replay()
        for call, kept in enumerate(seen):
            wrong += (kept != wants[(replay + call) % SETS]).any()
        if replay % 500 == 0:
            torch.cuda.synchronize()  # keeps the queue short
    assert wrong.item() == 0


def test_eager_calls_between_replays_of_two_graphs(device):
    """Graphs of one and of two calls and eager calls in any order: the epoch comes from the device."""
    size = dist.get_world_size()
    attention = UlyssesAttention(kernel="fa4", exchange="fused")
    parts = [shard(t).clone() for t in draw(device, 1, 200 * size, 2 * size, 64, seed=5)]
    want = UlyssesAttention(kernel="fa4", exchange="collective", copy=True)(*parts)
    attention(*parts)
    graphs, outs = [], []
    for calls in (1, 2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                out = attention(*parts)
        graphs.append(graph)
        outs.append(out)
    for step in range(300):
        which = step % 3
        out = attention(*parts) if which == 2 else outs[which]
        if which < 2:
            out.fill_(float("nan"))
            graphs[which].replay()
        assert torch.equal(out, want), f"step {step}"
