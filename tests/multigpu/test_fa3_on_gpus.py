"""Kernel 'fa3' between real GPUs: fused equals its own serial form bit by bit, in eager mode and in a graph."""

import pytest
import torch
import torch.distributed as dist

from fa_a2a import UlyssesAttention
from fa_a2a.ops import kernels


def draw(device, batch, rows, heads, dim, dtype=torch.bfloat16, seed=0):
    """This rank's q, k, v; of a whole that is drawn alike on every rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, rows * size, heads * size, dim)
    return [torch.randn(shape, device=device, generator=generator).to(dtype).chunk(size, 1)[rank] for _ in range(3)]


@pytest.fixture
def usable(device, need):
    trouble = kernels.problem("fa3", device, torch.bfloat16, 128, True)
    need("multigpu", trouble is None, str(trouble))
    return device


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "dim", "dtype"),
    [
        (1, 1152, 6, 128, torch.bfloat16),
        (1, 100, 1, 128, torch.float16),  # rows not a multiple of any tile
        (2, 321, 2, 64, torch.bfloat16),
        (3, 192, 2, 128, torch.bfloat16),
    ],
)
def test_fused_equals_serial_bitwise(usable, batch, rows, heads, dim, dtype):
    fused = UlyssesAttention(kernel="fa3", exchange="fused")
    serial = UlyssesAttention(kernel="fa3", exchange="collective")
    for seed in range(4):  # another call's data each time: a tile of the call before would show
        parts = draw(usable, batch, rows, heads, dim, dtype, seed)
        fused(*parts).fill_(float("nan"))
        got, lse = fused(*parts, return_lse=True)
        want, want_lse = serial(*parts, return_lse=True)
        assert torch.equal(got, want)
        assert torch.equal(lse, want_lse)
    assert (fused.last_plan.kernel, fused.last_plan.exchange) == ("fa3", "fused")


def test_replays_of_a_graph_equal_serial(usable):
    parts = draw(usable, 1, 700, 3, 128)
    fused = UlyssesAttention(kernel="fa3", exchange="fused")
    serial = UlyssesAttention(kernel="fa3", exchange="collective")
    with torch.inference_mode():
        fused(*parts)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = fused(*parts)
        for seed in range(20):
            for mine, new in zip(parts, draw(usable, 1, 700, 3, 128, seed=seed)):
                mine.copy_(new)
            graph.replay()
            assert torch.equal(out, serial(*parts))
