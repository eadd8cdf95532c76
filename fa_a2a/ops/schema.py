"""The layer as a torch.library operator, so that torch.compile(fullgraph=True) keeps it whole.

The operator is functional: it returns ordinary tensors, never views of the workspace. A compiler may reorder or merge
calls of a functional operator, and an alias of a hidden buffer would then show another call's result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import errors
from ..comm.group import resolve
from .functional import find_plan, whole_layer
from .options import Options


@torch.library.custom_op("fa_a2a::ulysses_attention", mutates_args=())
def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: str,
    kernel: str,
    exchange: str,
    scale: float | None,
    return_lse: bool,
    timeout_s: float,
    causal: bool = False,
    key_lengths: torch.Tensor | None = None,
    shard_sizes: Sequence[int] | None = None,
    replicated_text: int | None = None,
    whole_kv: bool = False,
    refused: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the whole layer; lse has no elements unless asked for. group: name of a process group. refused:
    kind and text of the error for arguments that this schema has no types for; every rank gets it."""
    where, options = resolve(group), Options(causal, key_lengths, shard_sizes, replicated_text, whole_kv)
    error: errors.FaA2AError | None = None
    if refused is not None:
        kind, _, text = refused.partition(": ")
        error = getattr(errors, kind)(text)
    plan = find_plan(where, q, k, v, scale, return_lse, kernel, exchange, timeout_s, False, options, error)
    out, lse = whole_layer(where, plan, (q, k, v), True, timeout_s)
    return out.contiguous(), q.new_empty(0, dtype=torch.float32) if lse is None else lse


@ulysses_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: str,
    kernel: str,
    exchange: str,
    scale: float | None,
    return_lse: bool,
    timeout_s: float,
    causal: bool = False,
    key_lengths: torch.Tensor | None = None,
    shard_sizes: Sequence[int] | None = None,
    replicated_text: int | None = None,
    whole_kv: bool = False,
    refused: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads = q.shape[:3] if q.dim() == 4 else (0, 0, 0)  # which the operator refuses
    lse = q.new_empty((batch, heads, rows) if return_lse else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), lse
