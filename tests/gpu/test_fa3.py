"""Kernel 'fa3' on one GPU: against float32 and torch, strides, chunks, grouped heads, the release."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fa_a2a.comm.symmetric import Release
from fa_a2a.layout import EPOCH_WORD, READY_WORD, SIGNAL_WORDS, ExchangeShape
from fa_a2a.ops import kernels
from fa_a2a.ops.fa3 import FA3
from fa_a2a.ops.fused import local_sink
from fa_a2a.ops.kernels import Sink
from fa_a2a.xstage.tiles import FA3_TILES


@pytest.fixture
def fa3(device, need):
    def get(dtype, head_dim):
        trouble = kernels.problem("fa3", device, dtype, head_dim, True)
        need("gpu", trouble is None, str(trouble))
        return kernels.load("fa3", device, dtype, head_dim, True, True)

    return get


def draw(device, batch, rows, keys, heads, heads_kv, dim, dtype, spread=1.0):
    torch.manual_seed(rows + keys)
    q = torch.randn(batch, rows, heads, dim, device=device).mul(spread).to(dtype)
    k, v = (torch.randn(batch, keys, heads_kv, dim, device=device).to(dtype) for _ in range(2))
    return q, k, v


def reference(q, k, v, dtype=torch.float32, scale=None):
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def log_sum_exp(q, k, scale):
    q, k = (t.float().transpose(1, 2) for t in (q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)))
    return (q @ k.mT * scale).logsumexp(-1)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 128), (torch.bfloat16, 64)])
@pytest.mark.parametrize(
    ("batch", "rows", "keys", "heads", "heads_kv", "spread"),
    [
        (1, 1, 1, 1, 1, 1),
        (1, 128, 144, 2, 2, 1),
        (2, 1000, 1000, 3, 3, 1),
        (1, 513, 2999, 6, 2, 1),  # grouped heads
        (1, 333, 777, 8, 1, 4),  # peaked weights
        (3, 65, 145, 2, 2, 16),
    ],
)
def test_error_is_at_most_twice_torchs(device, fa3, dtype, dim, batch, rows, keys, heads, heads_kv, spread):
    q, k, v = draw(device, batch, rows, keys, heads, heads_kv, dim, dtype, spread)
    got, lse = fa3(dtype, dim).local(q, k, v, dim**-0.5, 1, True)
    want = reference(q, k, v)
    torchs = reference(q, k, v, dtype).float()
    assert (got.float() - want).abs().max() <= 2 * (torchs - want).abs().max() + 1e-6
    torch.testing.assert_close(lse, log_sum_exp(q, k, dim**-0.5), rtol=1e-5, atol=1e-3)


# Against float32 where torch's own result is not finite: its bfloat16 kernel returns NaN for a scale of 0 or less (2x
# H200, torch 2.11, 2026-11-30; ours was right to 4e-4). Outputs are below 4, and bfloat16 keeps 8 bits: half a unit in
# the last place is 2^-9 of the value, once for the weights and once for the output.
WITHOUT_TORCH = 2 * 4 * 2**-9


@pytest.mark.parametrize("scale", [-0.1, 0.0, 0.01, 3.0])
def test_any_scale(device, fa3, scale):
    q, k, v = draw(device, 1, 200, 300, 2, 2, 128, torch.bfloat16)
    got, lse = fa3(torch.bfloat16, 128).local(q, k, v, scale, 1, True)
    scores = q.float().transpose(1, 2) @ k.float().transpose(1, 2).mT * scale
    want = (scores.softmax(-1) @ v.float().transpose(1, 2)).transpose(1, 2)
    torchs = reference(q, k, v, torch.bfloat16, scale).float()
    bound = 2 * (torchs - want).abs().max() + 1e-6 if torchs.isfinite().all() else WITHOUT_TORCH
    assert (got.float() - want).abs().max() <= bound
    torch.testing.assert_close(lse, log_sum_exp(q, k, scale), rtol=1e-5, atol=1e-3)
    sink = local_sink(ExchangeShape(1, 200, 2, 128, 1, 2), torch.bfloat16, device)
    (launch,) = fa3(torch.bfloat16, 128).launches(q, k, v, scale, sink, True, None)
    launch()
    assert torch.equal(sink.o[0], got) and torch.equal(sink.lse[0], lse)


def test_strided_views(device, fa3):
    """q, k, v as views of one fused projection, O between other heads and rows, which stay as they are."""
    kernel, dim = fa3(torch.bfloat16, 128), 128
    q, k, v = torch.randn(2, 300, 4, 3, dim, device=device).bfloat16().unbind(3)
    whole = torch.full((2, 303, 9, dim), float("nan"), device=device, dtype=torch.bfloat16)
    lse = torch.full((2, 9, 310), float("nan"), device=device)
    o = whole[:, 1:301, 2:6]
    kernel.fused(q, k, v, dim**-0.5, Sink((o,), (lse[:, 2:6, :300],)), True)
    want, want_lse = kernel.local(q.contiguous(), k.contiguous(), v.contiguous(), dim**-0.5, 1, True)
    assert torch.equal(o, want)
    assert torch.equal(lse[:, 2:6, :300], want_lse)
    assert int(whole.isnan().sum()) == whole.numel() - o.numel()
    assert int(lse.isnan().sum()) == lse.numel() - want_lse.numel()


@pytest.mark.parametrize(("ranks", "rows", "dim"), [(4, 300, 128), (3, 192, 64), (8, 127, 128), (32, 9, 128)])
def test_chunks_equal_plain_attention_bitwise(device, fa3, ranks, rows, dim):
    kernel, shape = fa3(torch.bfloat16, dim), ExchangeShape(2, ranks * rows, 2 * ranks, dim, ranks, 2)
    q, k, v = draw(device, 2, ranks * rows, ranks * rows, 2, 2, dim, torch.bfloat16)
    sink = local_sink(shape, torch.bfloat16, device)
    for o in sink.o:
        o.fill_(float("nan"))
    kernel.fused(q, k, v, dim**-0.5, sink, False)
    want, _ = kernel.local(q, k, v, dim**-0.5, ranks, False)
    assert torch.equal(torch.cat(sink.o, dim=1), want)


def test_chunks_may_lie_anywhere(device, fa3):
    """Unequal distances, in no order: what a sub-group of a larger world looks like."""
    kernel, dim, rows = fa3(torch.bfloat16, 128), 128, 200
    q, k, v = draw(device, 1, 4 * rows, 500, 3, 3, dim, torch.bfloat16)
    memory = torch.full((9, 1, rows, 3, dim), float("nan"), device=device, dtype=torch.bfloat16)
    lse = torch.full((9, 1, 3, rows), float("nan"), device=device)
    places = (5, 0, 7, 1)
    kernel.fused(q, k, v, dim**-0.5, Sink(tuple(memory[p] for p in places), tuple(lse[p] for p in places)), True)
    want, want_lse = kernel.local(q, k, v, dim**-0.5, 4, True)
    assert torch.equal(torch.cat([memory[p] for p in places], 1), want)
    assert torch.equal(torch.cat([lse[p] for p in places], 2), want_lse)
    assert memory[[2, 3, 4, 6, 8]].isnan().all()


def test_repeated_calls_are_bitwise_equal(device, fa3):
    """A race between the warps would show as a change between calls."""
    kernel = fa3(torch.bfloat16, 128)
    q, k, v = draw(device, 1, 2304, 2311, 6, 6, 128, torch.bfloat16)
    want, _ = kernel.local(q, k, v, 128**-0.5, 1, False)
    for _ in range(50):
        got, _ = kernel.local(q, k, v, 128**-0.5, 1, False)
        assert torch.equal(got, want)


@pytest.mark.parametrize("flags", [0, 2, 3, 7])
def test_release_publishes_the_epoch(device, fa3, flags):
    """Flags ADVANCE 1, PUBLISH 2, WAIT 4, on one rank that is its own only peer; the counter is left at zero."""
    kernel, shape = fa3(torch.bfloat16, 128), ExchangeShape(1, 400, 2, 128, 1, 2)
    q, k, v = draw(device, 1, 400, 400, 2, 2, 128, torch.bfloat16)
    block = torch.zeros(SIGNAL_WORDS, dtype=torch.int64, device=device)
    block[EPOCH_WORD] = 41
    counter = torch.zeros(1, dtype=torch.int64, device=device)
    record = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    peers = torch.tensor([block.data_ptr()], device=device)
    release = Release(peers, counter, 0, 1, flags, 10**9, record.data_ptr())
    sink = local_sink(shape, torch.bfloat16, device)
    (launch,) = kernel.launches(q, k, v, 128**-0.5, sink, False, release)
    for call in range(1, 4):
        launch()
        torch.cuda.synchronize()
        epoch = 41 + call * (flags & 1)
        expected = torch.zeros_like(block)
        expected[EPOCH_WORD], expected[READY_WORD] = epoch, epoch if flags & 2 else 0
        assert torch.equal(block, expected)
        assert counter.item() == 0
        assert not record.any()
    want, _ = kernel.local(q, k, v, 128**-0.5, 1, False)
    assert torch.equal(sink.o[0], want)


def test_cuda_graph(device, fa3):
    kernel = fa3(torch.bfloat16, 128)
    q, k, v = draw(device, 1, 1000, 1000, 2, 2, 128, torch.bfloat16)
    sink = local_sink(ExchangeShape(1, 1000, 2, 128, 1, 2), torch.bfloat16, device)
    (launch,) = kernel.launches(q, k, v, 128**-0.5, sink, False, None)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        for t in (q, k, v):
            t.normal_()
        sink.o[0].fill_(float("nan"))
        graph.replay()
        want, _ = kernel.local(q, k, v, 128**-0.5, 1, False)
        assert torch.equal(sink.o[0], want)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda q, k, v: (q.half(), k, v), "q is"),
        (lambda q, k, v: (q, k[:, :, :1], v), "same keys and heads"),
        (lambda q, k, v: (q, k[..., :64], v), "k is"),
        (lambda q, k, v: (q, k[:, :, :2], v[:, :, :2]), "multiple of those"),
    ],
)
def test_wrong_arguments_are_refused(device, fa3, change, rule):
    q, k, v = draw(device, 1, 100, 100, 3, 3, 128, torch.bfloat16)
    with pytest.raises(ValueError, match=rule):
        partial(fa3(torch.bfloat16, 128).local, *change(q, k, v), 0.1, 1, False)()


@pytest.mark.parametrize("head_dim", [dim for dim, tiles in FA3_TILES.items() if len(tiles) > 1])
def test_tiles_compute_the_same_bits(device, fa3, head_dim):
    """So a launch may take either, whatever the other launches of a call take."""
    fa3(torch.bfloat16, head_dim)
    q, k, v = draw(device, 2, 1000, 777, 6, 3, head_dim, torch.bfloat16)
    got = [
        FA3(device, head_dim, "bfloat16", (tile,)).local(q, k, v, head_dim**-0.5, 1, True)
        for tile in FA3_TILES[head_dim]
    ]
    for o, lse in got[1:]:
        assert torch.equal(o, got[0][0]) and torch.equal(lse, got[0][1])


def test_a_launch_takes_the_tile_whose_waves_end_first(device, fa3):
    kernel = fa3(torch.bfloat16, 64)
    assert kernel.num_sms == 132, "the shapes below are for so many"
    for rows, heads, want in [(4608, 6, 128), (8192, 6, 192)]:
        q, k, v = draw(device, 1, rows, rows, heads, heads, 64, torch.bfloat16)
        sink = local_sink(ExchangeShape(1, rows, heads, 64, 1, 2), torch.bfloat16, device)
        (launch,) = kernel.launches(q, k, v, 0.125, sink, False, None)
        assert [t.rows for t, forward in kernel._forward.items() if forward is launch.func] == [want]
        launch()
        assert torch.equal(sink.o[0], kernel.local(q, k, v, 0.125, 1, False)[0])
