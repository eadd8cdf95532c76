"""Kernel 'cpu' alone: against float64, and its two ways of storing against each other."""

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

from fa_a2a.layout import ExchangeShape
from fa_a2a.ops import cpu, fused

KERNEL = cpu.make(torch.device("cpu"), torch.float32, 64, True, True)


def inputs(batch, seq, heads, dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, seq, heads, dim, generator=generator).to(dtype) for _ in range(3)]


def exact(q, k, v, scale):
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(2, 3) * scale
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("seq", "dim"), [(1, 8), (65, 64), (256, 128), (600, 32)])
def test_error_at_most_twice_torchs(dtype, seq, dim):
    q, k, v = inputs(2, seq, 3, dim, dtype)
    want, want_lse = exact(q, k, v, dim**-0.5)
    torch_out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    out, lse = KERNEL.local(q, k, v, dim**-0.5, 1, True)
    allowed = 2 * (torch_out.double() - want).abs().max() + 1e-7
    assert (out.double() - want).abs().max() <= allowed
    assert out.dtype == dtype
    assert (lse.double() - want_lse).abs().max() < 2e-5 * (1 + want_lse.abs().max())


def test_case_08_lse():
    q, k, v = inputs(1, 16, 2, 128, torch.float16)
    _, lse = KERNEL.local(q, k, v, 0.3, 1, True)
    assert torch.allclose(lse.double(), exact(q, k, v, 0.3)[1], atol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 30.0, 300.0])
def test_large_and_small_scores_stay_finite(size):
    q, k, v = inputs(1, 300, 2, 64, torch.float32)
    q = q * size
    out, lse = KERNEL.local(q, k, v, 1.0, 1, True)
    want, want_lse = exact(q, k, v, 1.0)
    assert torch.allclose(out.double(), want, atol=2e-4 * max(1.0, size))
    assert torch.allclose(lse.double(), want_lse, rtol=1e-5)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_stores_to_a_sink_what_it_returns_locally(chunks):
    """Chunks of 50 rows, so that tiles of 64 would straddle them if nothing began anew at each."""
    q, k, v = inputs(2, 50 * chunks, 2, 32, torch.bfloat16)
    shape = ExchangeShape(2, 50 * chunks, 2 * chunks, 32, chunks, 2)
    sink = fused.local_sink(shape, q.dtype, q.device)
    KERNEL.fused(q, k, v, 0.2, sink, True)
    out, lse = KERNEL.local(q, k, v, 0.2, chunks, True)
    assert torch.equal(torch.cat(sink.o, dim=1), out)
    assert torch.equal(torch.cat(sink.lse, dim=2), lse)


def test_row_result_does_not_depend_on_the_rows_beside_it():
    q, k, v = inputs(1, 128, 1, 32, torch.float32)
    whole, _ = KERNEL.local(q, k, v, 0.2, 1, False)
    for rows in (1, 7, 63):
        part, _ = KERNEL.local(q[:, :rows], k, v, 0.2, 1, False)
        assert torch.equal(part, whole[:, :rows])


def test_takes_any_strides():
    qkv = torch.randn(2, 40, 3, 4, 16)
    q, k, v = qkv.unbind(2)
    strided, _ = KERNEL.local(q, k, v, 0.25, 2, False)
    plain, _ = KERNEL.local(q.contiguous(), k.contiguous(), v.contiguous(), 0.25, 2, False)
    assert torch.equal(strided, plain)
    assert strided.is_contiguous()
    turned = rearrange(rearrange(k, "b s h d -> h s b d").contiguous(), "h s b d -> b s h d")
    assert torch.equal(KERNEL.local(q, turned, v, 0.25, 2, False)[0], plain)
