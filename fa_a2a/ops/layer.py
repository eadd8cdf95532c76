"""Both halves of a layer in one call on the fused path. An eager layer costs the host's time, so what stands between
scatter_heads and attention_gather for a caller who has them apart is left out here; the steps are the same."""

from __future__ import annotations

import torch

from ..comm.workspace import Workspace
from . import fused, scatter
from .kernels import Qkv
from .norm_rope import NormRope
from .plan import Plan
from .trace import step


class Prepared:
    """The two steps of one plan on one workspace."""

    def __init__(self, plan: Plan, workspace: Workspace) -> None:
        self.store = workspace.prepare(scatter.Prepared, plan).store
        self.attention = workspace.prepare(fused.Prepared, plan)


def run(
    qkv: Qkv, plan: Plan, workspace: Workspace, timeout_s: float, norm_rope: NormRope | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q, k, v (B, s, H, D) to O (B, s, H, D) and LSE (B, H, s) if the plan has it: views of the workspace, valid until
    the next call on it. The workspace has been checked."""
    workspace.take_turn("scatter")
    try:
        workspace.order_streams()
        prepared = workspace.prepare(Prepared, plan)
        with step("layer", qkv[0].device):
            workspace.poison_output()
            prepared.store(*qkv, timeout_s, norm_rope)
            workspace.take_turn("attention")
            prepared.attention.attend(timeout_s)
    except BaseException as error:
        workspace.poison(error)
        raise
    if not plan.adapter.can_release:
        workspace.finish(timeout_s)
    workspace.check_guards()
    workspace.end_turn()
    return prepared.attention.output()
