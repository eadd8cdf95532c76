"""Which rank ends up with what. Every element says its batch entry, position, head and tensor, so that a wrong one
names where it came from; all values are small integers, exact in every dtype."""

import pytest
import torch

from fa_a2a import HeadShards, UlyssesAttention, attention_gather, scatter_heads
from fa_a2a.comm.group import resolve

BATCH, ROWS, DIM = 2, 5, 16


def labels(name, size, dtype):
    """(B, S, H, D) whose elements are (batch, position, head, tensor), repeated."""
    seq, heads = ROWS * size, 2 * size
    b, s, h = torch.meshgrid(torch.arange(BATCH), torch.arange(seq), torch.arange(heads), indexing="ij")
    field = torch.stack([b, s, h, torch.full_like(b, "qkv".index(name))], dim=-1)
    return field.repeat(1, 1, 1, DIM // 4).to(dtype)


def wrong(got, want):
    """The first differing element, spelled out; None if equal to the bit."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    bad = (got != want).any(-1).nonzero()
    if not len(bad):
        return None
    at = tuple(bad[0].tolist())
    fields = [dict(zip(("batch", "position", "head", "tensor"), x[at][:4].tolist())) for x in (got, want)]
    return f"at {at}: came from {fields[0]} instead of {fields[1]}; {len(bad)} rows differ"


def scattered(rank, size, exchange, dtype):
    dtype = getattr(torch, dtype)
    whole = {name: labels(name, size, dtype) for name in "qkv"}
    mine = [whole[name].chunk(size, dim=1)[rank] for name in "qkv"]
    shards = scatter_heads(*mine, kernel="cpu", exchange=exchange)
    heads = slice(2 * rank, 2 * rank + 2)
    want = {name: t[:, :, heads] for name, t in whole.items()}
    if exchange == "fused":  # Q's rows lie in chunk order, own chunk first
        owners = resolve(None).workspace.owners
        assert owners[0] == rank
        want["q"] = torch.cat([want["q"].chunk(size, dim=1)[owner] for owner in owners], dim=1)
    found = {name: wrong(getattr(shards, f"_{name}"), want[name]) for name in "qkv"}
    attention_gather(shards)
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("exchange", ["fused", "collective"])
def test_scatter_brings_every_token_of_my_heads(ranks, size, exchange):
    for dtype in ("float32", "bfloat16", "float16"):
        assert ranks(size).run(scattered, exchange=exchange, dtype=dtype) == [{}] * size


def signs(size, dtype):
    """(B, S, H, D) of +-1: the bits of the position. Two positions differ in one sign at least."""
    seq = ROWS * size
    bits = (torch.arange(seq)[:, None] >> torch.arange(DIM)) & 1
    return (2 * bits - 1).to(dtype)[None, :, None].expand(BATCH, seq, 2 * size, DIM).contiguous()


def attended(rank, size, exchange, dtype, head_sharded):
    """Queries that match exactly one key, with a scale that drives all other weights to zero: the output at a position
    is V at the position, to the bit, wherever the kernel stored it."""
    dtype = getattr(torch, dtype)
    q = k = signs(size, dtype)
    v = labels("v", size, dtype)
    want = v.chunk(size, dim=1)[rank]
    if head_sharded:
        local = [t[:, :, 2 * rank : 2 * rank + 2] for t in (q, k, v)]
        shards = HeadShards.from_tensors(*local, scale=200.0, kernel="cpu", exchange=exchange)
    else:
        local = [t.chunk(size, dim=1)[rank] for t in (q, k, v)]
        shards = scatter_heads(*local, scale=200.0, kernel="cpu", exchange=exchange)
    return wrong(attention_gather(shards)[0], want)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("exchange", ["fused", "collective"])
@pytest.mark.parametrize("head_sharded", [False, True], ids=["scattered", "from_tensors"])
def test_gather_brings_every_head_of_my_tokens(ranks, size, exchange, head_sharded):
    for dtype in ("float32", "bfloat16"):
        found = ranks(size).run(attended, exchange=exchange, dtype=dtype, head_sharded=head_sharded)
        assert found == [None] * size


def lse_labels(rank, size, exchange):
    """q = (position, head), k picks them by a common key: the score, and so the LSE, is a number for each of them."""
    seq, heads = ROWS * size, 2 * size
    code = torch.arange(BATCH)[:, None, None] * 4096 + torch.arange(seq)[:, None] * 64 + torch.arange(heads)
    q = torch.zeros(BATCH, seq, heads, DIM)
    q[..., 0] = code
    k = torch.zeros_like(q)
    k[..., 0] = 1.0
    layer = UlyssesAttention(kernel="cpu", exchange=exchange)
    _, lse = layer(*(t.chunk(size, dim=1)[rank] for t in (q, k, k)), scale=1.0, return_lse=True)
    source = (lse - torch.tensor(float(seq)).log()).round()  # log of the number of equal scores
    return torch.equal(source, code.chunk(size, dim=1)[rank].transpose(1, 2).float())


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("exchange", ["fused", "collective"])
def test_lse_of_every_head_of_my_tokens(ranks, size, exchange):
    assert ranks(size).run(lse_labels, exchange=exchange) == [True] * size
