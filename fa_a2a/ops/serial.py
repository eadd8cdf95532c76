"""The serial path: an all-to-all, an attention kernel, an all-to-all. Reference for the fused one, and fallback."""

from __future__ import annotations

import torch

from ..comm import collectives
from ..comm.group import Group
from .kernels import Qkv
from .plan import Plan
from .trace import step


def scatter(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group) -> Qkv:
    """q, k, v (B, s, H, D) to (B, S, h, D), rows in global order."""
    with step("scatter_heads", q.device):
        return (
            collectives.scatter_heads(q, group),
            collectives.scatter_heads(k, group),
            collectives.scatter_heads(v, group),
        )


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: Group
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over (B, S, h, D), then the exchange: O (B, s, H, D), and LSE (B, H, s) if the plan has it."""
    request = plan.request
    with step("attention", q.device):
        o, lse = plan.adapter.local(q, k, v, request.scale, group.size, request.with_lse)
    with step("gather_heads", q.device):
        return collectives.gather_heads(o, group), None if lse is None else collectives.gather_lse(lse, group)
