"""Results: fused against serial to the bit, both against float64, over shapes, dtypes, strides and options."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from workers import coded, reference, reference_lse, shard

from fa_a2a import HeadShards, UlyssesAttention, attention_gather

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fused_and_serial(rank, size, cases):
    """The cases (dtype, batch, rows, head_dim, local heads) in which the two paths differ."""
    fused, serial = (UlyssesAttention(kernel="cpu", exchange=e) for e in ("fused", "collective"))
    differ = []
    for case in cases:
        dtype, batch, rows, dim, heads = case
        q, k, v = (shard(t, rank, size) for t in coded(batch, rows * size, heads * size, dim, dtype, seed=rows))
        out, lse = fused(q, k, v, return_lse=True)
        assert not out.isnan().any()
        again, lse_again = serial(q, k, v, return_lse=True)
        if not (torch.equal(out, again) and torch.equal(lse, lse_again)):
            differ.append(case)
    return differ


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_fused_equals_serial_bitwise_over_shapes(ranks, size):
    shapes = [(1, 1, 8, 1), (2, 7, 64, 2), (1, 65, 16, 1), (3, 33, 24, 1)]
    cases = [(d, *s) for d, s in itertools.product(DTYPES, shapes)]
    assert ranks(size).run(fused_and_serial, cases=cases) == [[]] * size


def errors(rank, size, exchange, dtype, scale):
    whole = coded(2, 24 * size, size, 64, dtype, seed=3)
    q, k, v = (shard(t, rank, size) for t in whole)
    layer = UlyssesAttention(kernel="cpu", exchange=exchange)
    out, lse = layer(q, k, v, scale=scale, return_lse=True)
    want = shard(reference(*whole, scale=scale), rank, size)
    want_lse = reference_lse(*whole[:2], scale=scale).chunk(size, dim=2)[rank]
    torch_out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in whole), scale=scale).transpose(1, 2)
    torch_error = (shard(torch_out, rank, size).double() - want).abs().max().item()
    return (out.double() - want).abs().max().item(), torch_error, (lse.double() - want_lse).abs().max().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exchange", ["fused", "collective"])
@pytest.mark.parametrize("scale", [None, 0.5, -0.25])
def test_error_at_most_twice_torchs(ranks, dtype, exchange, scale):
    for error, torch_error, lse_error in ranks(4).run(errors, exchange=exchange, dtype=dtype, scale=scale):
        assert error <= 2 * torch_error + 1e-6
        assert lse_error < 1e-4


def lse_fp16(rank, size, exchange):
    q, k, v = coded(1, 16, 2, 128, torch.float16)
    layer = UlyssesAttention(kernel="cpu", exchange=exchange)
    _, lse = layer(*(shard(t, rank, size) for t in (q, k, v)), return_lse=True)
    assert lse.dtype == torch.float32
    return (lse.double() - reference_lse(q, k).chunk(size, dim=2)[rank]).abs().max().item()


@pytest.mark.parametrize("exchange", ["fused", "collective"])
def test_case_08_lse(ranks, exchange):
    assert max(ranks(2).run(lse_fp16, exchange=exchange)) < 1e-5


def strided(rank, size, exchange, dtype):
    """One fused QKV projection, head-first storage, an odd offset into memory, and a broadcast."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 6 * size, 3, 2 * size, 16, generator=generator).to(dtype)
    layer = UlyssesAttention(kernel="cpu", exchange=exchange, copy=True)

    def equal(q, k, v):
        return torch.equal(layer(q, k, v), layer(*(t.contiguous() for t in (q, k, v))))

    qkv = shard(x, rank, size)
    q, k, v = qkv.unbind(2)
    assert not q.is_contiguous()
    offset = torch.empty(q.numel() + 1, dtype=dtype)[1:].view(q.shape).copy_(q)
    assert offset.data_ptr() % 16
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    backwards = q.transpose(1, 3).contiguous().transpose(1, 3)  # head_dim is not the contiguous axis
    return {
        "projection": equal(q, k, v),
        "offset": equal(offset, k, v),
        "heads first": equal(heads_first, k, v),
        "head_dim not contiguous": equal(backwards, k, v),
        "broadcast batch": equal(q[:1].expand_as(q), k, v),
        "one tensor thrice": equal(q, q, q),
    }


@pytest.mark.parametrize("exchange", ["fused", "collective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_of_the_inputs_do_not_matter(ranks, exchange, dtype):
    for found in ranks(2).run(strided, exchange=exchange, dtype=dtype):
        assert all(found.values()), found


def wrapped(rank, size, exchange, with_lse):
    whole = coded(2, 6 * size, 2 * size, 16, torch.bfloat16)
    heads = slice(2 * rank, 2 * rank + 2)
    shards = HeadShards.from_tensors(
        *(t[:, :, heads] for t in whole), scale=0.3, return_lse=with_lse, kernel="cpu", exchange=exchange
    )
    out, lse = attention_gather(shards, copy=True)
    again, _ = attention_gather(shards, copy=True)  # its inputs are ordinary tensors and stay
    layer = UlyssesAttention(kernel="cpu", exchange="collective")
    want, want_lse = layer(*(shard(t, rank, size) for t in whole), scale=0.3, return_lse=True)
    return torch.equal(out, want), torch.equal(again, want), torch.equal(lse, want_lse) if with_lse else lse is None


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("exchange", ["fused", "collective"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_from_tensors_equals_the_whole_layer(ranks, size, exchange, with_lse):
    assert ranks(size).run(wrapped, exchange=exchange, with_lse=with_lse) == [(True, True, True)] * size


def auto(rank, size):
    whole = coded(1, 8 * size, size, 16, torch.float32)
    q, k, v = (shard(t, rank, size) for t in whole)
    found = []
    for options in ({}, {"exchange": "collective"}, {"kernel": "torch"}, {"kernel": "cpu", "exchange": "fused"}):
        layer = UlyssesAttention(**options)
        assert torch.allclose(layer(q, k, v).double(), shard(reference(*whole), rank, size), atol=1e-5)
        plan = layer.last_plan
        found.append((plan.kernel, plan.exchange, plan.reason))
    return found


def test_auto_says_what_it_took_and_why(ranks):
    fallback = "exchange falls back to 'collective': kernel 'torch' cannot store into other ranks"
    for found in ranks(2).run(auto):
        assert found == [
            ("cpu", "fused", "the first choice of auto, which runs here"),
            ("torch", "collective", "the first choice of auto, which runs here"),
            ("torch", "collective", fallback),
            ("cpu", "fused", "as asked for"),
        ]
