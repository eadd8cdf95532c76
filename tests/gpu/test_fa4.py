"""Kernel 'fa4' on one GPU: the stride form with local stores, and views of raw addresses."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fa_a2a.comm.pointer import bytes_at, tensor_at
from fa_a2a.comm.symmetric import Release
from fa_a2a.layout import ExchangeShape
from fa_a2a.ops import kernels
from fa_a2a.ops.fa4 import _FA4
from fa_a2a.ops.fused import local_sink
from fa_a2a.xstage.tiles import FA4_TILES


@pytest.fixture
def fa4(device, need):
    def get(dtype, head_dim, with_lse=False):
        trouble = kernels.problem("fa4", device, dtype, head_dim, with_lse)
        need("gpu", trouble is None, str(trouble))
        return kernels.load("fa4", device, dtype, head_dim, with_lse, True)

    return get


def draw(device, batch, seq, heads, dim, dtype):
    return [torch.randn(batch, seq, heads, dim, device=device).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "seq", "dim"), [(1, 1000, 128), (2, 513, 64), (1, 16, 128)])
def test_error_is_at_most_twice_torchs(device, fa4, dtype, batch, seq, dim):
    q, k, v = draw(device, batch, seq, 3, dim, dtype)
    got, _ = fa4(dtype, dim).local(q, k, v, dim**-0.5, 1, False)
    first = [t.transpose(1, 2) for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*(t.float() for t in first)).transpose(1, 2)
    torchs = F.scaled_dot_product_attention(*first).transpose(1, 2)
    assert (got.float() - want).abs().max() <= 2 * (torchs.float() - want).abs().max()


@pytest.mark.parametrize(("ranks", "rows", "dim"), [(4, 300, 128), (3, 192, 64), (8, 127, 128)])
def test_chunks_by_stride_equal_plain_attention_bitwise(device, fa4, ranks, rows, dim):
    kernel, shape = fa4(torch.bfloat16, dim), ExchangeShape(2, ranks * rows, 2 * ranks, dim, ranks, 2)
    q, k, v = draw(device, 2, ranks * rows, 2, dim, torch.bfloat16)
    sink = local_sink(shape, torch.bfloat16, device)
    for o in sink.o:
        o.fill_(float("nan"))
    assert len(sink.by_run) == 1
    kernel.fused(q, k, v, dim**-0.5, sink, False)
    want, _ = kernel.local(q, k, v, dim**-0.5, ranks, False)
    assert torch.equal(torch.cat(sink.o, dim=1), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "ranks", "rows", "keys", "groups"),
    [(1, 4, 1152, 4608, 1), (2, 3, 191, 777, 1), (1, 2, 129, 1000, 3), (1, 1, 1, 5, 1), (1, 8, 193, 128, 2)],
)
def test_tiles_compute_the_same_bits(device, fa4, dtype, batch, ranks, rows, keys, groups):
    """Of O and LSE, serial and fused: so a launch may take either, whatever the other launches of a call take."""
    fa4(dtype, 64, True)
    q = torch.randn(batch, ranks * rows, 6, 64, device=device).to(dtype)
    k, v = (torch.randn(batch, keys, 6 // groups, 64, device=device).to(dtype) for _ in range(2))
    sink, got = local_sink(ExchangeShape(batch, ranks * rows, 6 * ranks, 64, ranks, 2), dtype, device), []
    for tile in [t[:2] for t in FA4_TILES[64]]:
        kernel = _FA4(device, dtype, 64, True, fused=True, tile=tile, heads_per_kv=groups)
        got.append(kernel.local(q, k, v, 0.125, ranks, True))
        for t in (*sink.o, *sink.lse):
            t.fill_(float("nan"))
        kernel.fused(q, k, v, 0.125, sink, True)
        got.append((torch.cat(sink.o, dim=1), torch.cat(sink.lse, dim=2)))
    for o, lse in got[1:]:
        assert torch.equal(o, got[0][0]) and torch.equal(lse, got[0][1])


def test_a_launch_takes_the_tile_whose_waves_end_first(device, fa4):
    kernel = fa4(torch.bfloat16, 64)
    assert kernel.num_sms == 132, "the shapes below are for so many"
    for seq, want in [(4608, 128), (8192, 192)]:
        q, k, v = draw(device, 1, seq, 6, 64, torch.bfloat16)
        sink = local_sink(ExchangeShape(1, seq, 24, 64, 4, 2), torch.bfloat16, device)
        (launch,) = kernel.launches(q, k, v, 0.125, sink, False, Release.none(device))
        assert launch.func.tile == (want, 128)
        launch()
        assert kernel.tile(seq, 6).rows == want, "of attention alone, too"
        assert torch.equal(torch.cat(sink.o, dim=1), kernel.local(q, k, v, 0.125, 1, False)[0])


@pytest.mark.parametrize("causal_from", [0, 77, 500, 640])
def test_causal_rows_and_those_behind_them(device, need, causal_from):
    """The causal kernel keeps the first tile; rows that see all 640 keys take the smaller one by the choice."""
    trouble = kernels.problem("fa4", device, torch.bfloat16, 64, True, causal=True)
    need("gpu", trouble is None, str(trouble))
    (q, *_), (_, k, v) = (draw(device, 1, rows, 6, 64, torch.bfloat16) for rows in (900, 640))
    chosen = kernels.load("fa4", device, torch.bfloat16, 64, True, True, causal=True)
    assert chosen.tile(900 - max(0, 640 - causal_from), 6).rows == 128
    first = _FA4(device, torch.bfloat16, 64, True, tile=FA4_TILES[64][0][:2], causal=True)
    (o, lse), (want, want_lse) = (x.local(q, k, v, 0.125, 1, True, causal_from) for x in (chosen, first))
    assert torch.equal(o, want) and torch.equal(lse, want_lse)


def test_views_of_raw_addresses(device):
    x = torch.arange(64, dtype=torch.bfloat16, device=device).view(4, 16)
    column = tensor_at(x.data_ptr() + 2, (4,), (16,), torch.bfloat16, device)
    assert column.tolist() == [1, 17, 33, 49]
    assert torch.equal(bytes_at(x.data_ptr(), 128, device), x.view(torch.uint8).flatten())


def test_one_rank_is_plain_attention(device, fa4):
    from fa_a2a import UlyssesAttention

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if "RANK" in os.environ:
        pytest.skip("under torchrun the default group has more ranks")
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        q, k, v = draw(device, 2, 300, 4, 128, torch.bfloat16)
        attention = UlyssesAttention()
        out, lse = attention(q, k, v, return_lse=True)
        want, want_lse = fa4(torch.bfloat16, 128, True).local(q, k, v, 128**-0.5, 1, True)
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
        assert attention.last_plan.kernel == "fa4"
    finally:
        dist.destroy_process_group()
