"""RMS-norm and rotary embedding in the kernel that scatters, against torch operations before it."""

import pytest
import torch
import torch.distributed as dist
from test_fused_layer import draw, shard

from fa_a2a import NormRope, UlyssesAttention


@pytest.mark.parametrize(("interleaved", "pairs", "dim"), [(True, True, 128), (False, False, 64)])
def test_in_the_kernel_equals_before_within_rounding(device, interleaved, pairs, dim):
    size, rank, rows = dist.get_world_size(), dist.get_rank(), 200
    q, k, v = (shard(t) for t in draw(device, 1, rows * size, 2 * size, dim))
    generator = torch.Generator(device).manual_seed(1)
    weights = [(1 + 0.1 * torch.randn(dim, device=device, generator=generator)).bfloat16() for _ in range(2)]
    angle = torch.randn(rows * size, dim // 2, device=device, generator=generator)[rank * rows : (rank + 1) * rows]
    if not pairs:
        angle = torch.cat([angle, angle], -1)
    both = NormRope(*weights, cos=angle.cos(), sin=angle.sin(), interleaved=interleaved)
    attention = UlyssesAttention(kernel="fa4", exchange="fused")
    out = attention(q, k, v, norm_rope=both).clone()
    assert attention.last_plan.norm_rope_in_kernel
    want = UlyssesAttention(kernel="fa4", exchange="collective", copy=True)(*both.applied(q, k), v)
    plain = UlyssesAttention(kernel="fa4", exchange="collective", copy=True)(q, k, v)
    # a different last bit of q or k here and there
    assert (out.float() - want.float()).abs().max() < 2**-7 * want.float().abs().max()
    assert (plain.float() - want.float()).abs().max() > 2**-4 * want.float().abs().max()
    by_itself = UlyssesAttention(kernel="fa4")
    assert torch.equal(by_itself(q, k, v, norm_rope=both), out) and not by_itself.last_plan.overlapped
