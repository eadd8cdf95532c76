"""The two exchanges through torch.distributed: the reference, the fallback, and what is compared with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from einops import rearrange

from .group import Group


def scatter_heads(x_BsHD: torch.Tensor, group: Group) -> torch.Tensor:
    """Sequence-sharded (B, s, H, D) to head-sharded (B, S, h, D), rows in global order. One all-to-all."""
    if group.size == 1:
        return x_BsHD
    send = rearrange(x_BsHD, "b s (p h) d -> p b s h d", p=group.size).contiguous()
    return rearrange(_all_to_all(send, group), "p b s h d -> b (p s) h d")


def gather_heads(x_BShD: torch.Tensor, group: Group) -> torch.Tensor:
    """Head-sharded (B, S, h, D), global row order, to sequence-sharded (B, s, H, D). One all-to-all, one permute."""
    if group.size == 1:
        return x_BShD
    send = rearrange(x_BShD, "b (p s) h d -> p b s h d", p=group.size).contiguous()
    return rearrange(_all_to_all(send, group), "p b s h d -> b s (p h) d").contiguous()


def gather_lse(lse_BhS: torch.Tensor, group: Group) -> torch.Tensor:
    """Log-sum-exp (B, h, S) to (B, H, s)."""
    if group.size == 1:
        return lse_BhS
    send = rearrange(lse_BhS, "b h (p s) -> p b h s", p=group.size).contiguous()
    return rearrange(_all_to_all(send, group), "p b h s -> b (p h) s").contiguous()


def _all_to_all(send: torch.Tensor, group: Group) -> torch.Tensor:
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group.handle)
    return received
