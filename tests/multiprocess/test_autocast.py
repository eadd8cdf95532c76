"""Under autocast every path computes in what it says, bitwise what it computes without."""

import pytest
import torch

pytest.importorskip("diffusers")
from diffusion_models import clean, draw
from workers import inputs

from fa_a2a import NormRope, UlyssesAttention, attention_gather, scatter_heads


def both(call):
    """Whether the call gives the same, and in the same dtypes, under autocast."""
    with torch.no_grad():
        want = call()
        with torch.autocast("cpu", torch.bfloat16):
            got = call()
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def layers(rank, size, kernel, exchange, dtype):
    q, k, v = inputs(rank, size, dtype=dtype)
    norm = NormRope(torch.rand(16), torch.rand(16), cos=torch.rand(8, 16), sin=torch.rand(8, 16))
    layer = UlyssesAttention(kernel=kernel, exchange=exchange, copy=True)
    found = [both(lambda options=options: [layer(q, k, v, **options)]) for options in ({}, {"norm_rope": norm})]
    if kernel == "cpu":
        found.append(both(lambda: layer(q, k, v, return_lse=True)))
        options = {"kernel": kernel, "exchange": exchange, "return_lse": True}
        found.append(both(lambda: attention_gather(scatter_heads(q, k, v, **options), copy=True)))
    return all(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("size", "kernel", "exchange"),
    [(2, "cpu", "fused"), (2, "cpu", "collective"), (2, "torch", "collective"), (8, "cpu", "fused")],
)
def test_layer(ranks, size, kernel, exchange, dtype):
    assert all(ranks(size).run(layers, kernel=kernel, exchange=exchange, dtype=dtype))


def through_diffusers(rank, size):
    from test_diffusers_calls import dispatch, fa, keys_valid, parallel_config, shard, whole

    fa.enable()
    mine, config = [shard(whole(seed=s), rank, size) for s in range(3)], parallel_config(size)
    added = draw(1, 4, 1, 32).chunk(size, -1)[rank]
    try:
        masks = None, shard(keys_valid(), rank, size), added
        return all(both(lambda mask=mask: [dispatch(*mine, config, attn_mask=mask)]) for mask in masks)
    finally:
        clean()


def test_diffusers_backend(ranks):
    assert all(ranks(2).run(through_diffusers))


def compiled_layer(rank, size):
    torch._dynamo.reset()
    layer = torch.compile(UlyssesAttention(kernel="cpu"), fullgraph=True, backend="aot_eager")
    return both(lambda: [layer(*inputs(rank, size))])


def test_compiled_layer(ranks):
    assert all(ranks(2).run(compiled_layer))
