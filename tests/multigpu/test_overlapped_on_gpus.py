"""The layer as one kernel: bitwise equal to collectives and the kernel on keys in its order, whoever is late."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_fused_layer import draw, shard

from fa_a2a import UlyssesAttention, scatter_heads
from fa_a2a.comm.group import resolve
from fa_a2a.errors import ConfigurationError, UnsupportedError
from fa_a2a.ops import overlap

SLEEP_CYCLES = 20_000_000  # about 10 ms


def layer(**options):
    return UlyssesAttention(kernel="fa4", exchange="overlapped", **options)


def serial(parts, plan):
    return overlap.serial_form(*parts, plan, resolve(None).workspace)


@pytest.mark.parametrize(
    ("rows", "heads", "dtype"),
    [
        (1152, 6, torch.bfloat16),
        (1152, 6, torch.float16),
        (4096, 3, torch.bfloat16),
        (100, 1, torch.bfloat16),  # fewer rows than a key tile
        (321, 5, torch.bfloat16),
        (1, 1, torch.bfloat16),
    ],
)
def test_equals_the_serial_form_bitwise_and_float32_closely(device, rows, heads, dtype):
    size = dist.get_world_size()
    q, k, v = draw(device, 1, rows * size, heads * size, 128, dtype)
    parts = [shard(t) for t in (q, k, v)]
    attention = layer()
    first, _ = attention(*parts, return_lse=True)
    first.fill_(float("nan"))
    got, lse = attention(*parts, return_lse=True)
    want, want_lse = serial(parts, attention.last_plan)
    assert torch.equal(got, want)
    assert torch.equal(lse, want_lse)
    few = [t[..., : 2 * heads, :].transpose(1, 2) for t in (q, k, v)]
    exact = shard(F.scaled_dot_product_attention(*(t.float() for t in few)).transpose(1, 2))
    limit = (shard(F.scaled_dot_product_attention(*few).transpose(1, 2)).float() - exact).abs().max()
    assert (got[..., : 2 * heads, :].float() - exact).abs().max() <= 2 * limit


def test_differs_from_the_global_order_by_rounding_alone(device):
    size = dist.get_world_size()
    parts = [shard(t) for t in draw(device, 1, 1152 * size, 3 * size, 128)]
    got = layer(copy=True)(*parts).float()
    fused = UlyssesAttention(kernel="fa4", exchange="fused")(*parts).float()
    assert (got - fused).abs().max() <= 2**-7 * fused.abs().max()  # two units in the last place of the largest


@pytest.mark.parametrize("late", range(2))
def test_results_are_right_whoever_is_late(device, late):
    size = dist.get_world_size()
    attention = layer(copy=True)
    inputs = [[shard(t) for t in draw(device, 1, 640 * size, 4 * size, 128, seed=s)] for s in range(6)]
    attention(*inputs[0]).fill_(float("nan"))
    outs = []
    for index, parts in enumerate(inputs):
        if dist.get_rank() == late and index % 2:
            torch.cuda._sleep(SLEEP_CYCLES)
        outs.append(attention(*parts))
    for parts, out in zip(inputs, outs):
        assert torch.equal(out, serial(parts, attention.last_plan)[0])


def test_strided_inputs(device):
    size = dist.get_world_size()
    fused_qkv = torch.randn(1, 300, 2 * size, 3, 128, device=device, dtype=torch.bfloat16)
    views, attention = fused_qkv.unbind(3), layer()
    got = attention(*views)
    assert torch.equal(got, serial([t.contiguous() for t in views], attention.last_plan)[0])


def test_an_output_may_be_the_next_input(device):
    """Peers store into the output's memory while this rank still reads its inputs."""
    size = dist.get_world_size()
    attention = layer()
    for rows in (128, 1152):
        out = attention(*(shard(t) for t in draw(device, 1, rows * size, 4 * size, 128)))
        for _ in range(5):
            before = out.clone()
            out = attention(out, out, out)
            got = out.clone()
            assert torch.equal(got, serial([before] * 3, attention.last_plan)[0])


def test_graph_replays_with_new_inputs(device):
    size = dist.get_world_size()
    attention = layer()
    static = [shard(t).clone() for t in draw(device, 1, 512 * size, 3 * size, 128)]
    attention(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            out = attention(*static)
    for step in range(50):
        for t, fresh in zip(static, draw(device, 1, 512 * size, 3 * size, 128, seed=step)):
            t.copy_(shard(fresh))
        out.fill_(float("nan"))
        if step % 7 == dist.get_rank():
            torch.cuda._sleep(SLEEP_CYCLES // 20)
        graph.replay()
        got = out.clone()
        assert torch.equal(got, serial(static, attention.last_plan)[0]), f"replay {step}"
        if step % 20 == 7:
            assert torch.equal(attention(*static), got)  # eager between replays


def test_follows_the_fused_path_and_the_other_way_round(device):
    """One workspace, one epoch, and words of both kinds."""
    size = dist.get_world_size()
    parts = [shard(t) for t in draw(device, 1, 384 * size, 2 * size, 128)]
    overlapped, fused = layer(copy=True), UlyssesAttention(kernel="fa4", exchange="fused", copy=True)
    want = overlapped(*parts), fused(*parts)
    for _ in range(20):
        assert torch.equal(overlapped(*parts), want[0])
        assert torch.equal(fused(*parts), want[1])


def test_compiled(device):
    size = dist.get_world_size()
    parts = [shard(t) for t in draw(device, 1, 192 * size, 2 * size, 128)]
    attention = layer(copy=True)
    want = attention(*parts)
    with torch.no_grad():
        got = torch.compile(lambda *x: attention(*x) + attention(*x), fullgraph=True)(*parts)
    assert torch.equal(got, want + want)


def test_guards_stay_untouched(device):
    size = dist.get_world_size()
    for rows in (100, 333, 1152):
        layer()(*(shard(t) for t in draw(device, 1, rows * size, 2 * size, 128)), return_lse=True)
        torch.cuda.synchronize()
        dist.barrier()
        assert resolve(None).workspace.damaged_guards() == []


def test_what_it_does_not_take_is_refused_by_name(device):
    size = dist.get_world_size()
    parts = [shard(t) for t in draw(device, 1, 128 * size, 2 * size, 128)]
    with pytest.raises(UnsupportedError, match="batch 1 and head_dim 128; use exchange='fused'"):
        layer()(*(t[..., :64].contiguous() for t in parts))
    with pytest.raises(ConfigurationError, match="no first half"):
        scatter_heads(*parts, exchange="overlapped")
