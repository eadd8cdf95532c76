"""The serial path: an all-to-all, an attention kernel, an all-to-all. Reference for the fused one, and fallback."""

from __future__ import annotations

import torch

from ..comm import collectives
from ..comm.group import Group
from ..layout import ExchangeShape
from . import pieces
from .kernels import Qkv
from .plan import Plan
from .trace import step


def scatter(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, shape: ExchangeShape | None = None) -> Qkv:
    """q, k, v (B, s, H, D) to (B, S, h, D), rows in global order. shape: None for equal shards and heads."""
    with step("scatter_heads", q.device):
        if shape is None or (shape.equal_shards and shape.equal_heads):
            return (
                collectives.scatter_heads(q, group),
                collectives.scatter_heads(k, group),
                collectives.scatter_heads(v, group),
            )
        return (
            collectives.scatter_unequal(q, shape.head_ranges, shape, group),
            collectives.scatter_unequal(k, shape.kv_ranges, shape, group),
            collectives.scatter_unequal(v, shape.kv_ranges, shape, group),
        )


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: Group
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over (B, S, h, D), then the exchange: O (B, s, H, D), and LSE (B, H, s) if the plan has it."""
    request, shape = plan.request, plan.shape
    alone = shape.num_ranks == 1  # a group of one rank, or whole K and V
    work = pieces.cut(shape, 0 if alone else group.rank, plan.adapter, request.key_lengths)
    chunks = group.size if not alone and shape.equal_shards else 1
    with step("attention", q.device):
        o, lse = pieces.local(plan.adapter, work, (q, k, v), request.scale, chunks, request.with_lse, request.causal)
    if alone:
        return o, lse
    with step("gather_heads", q.device):
        if shape.equal_shards and shape.equal_heads:
            return collectives.gather_heads(o, group), None if lse is None else collectives.gather_lse(lse, group)
        out = collectives.gather_unequal(o, shape, group)
        return out, None if lse is None else collectives.gather_lse_unequal(lse, shape, group)
