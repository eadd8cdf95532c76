"""Attention that the fused path does not take: the exchanges as collectives, torch's SDPA between them.

Masks over the keys, and another number of keys than queries. A mask is sharded like the keys it belongs to, so it is
gathered in their order. Whether it is all true, or one of padded keys, is not asked here: the answer would stop the
host in every layer. It is asked where a model is given its mask, once (joint.py), for models known to have one.
"""

from __future__ import annotations

import json
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...comm import collectives
from ...comm.group import Group, resolve
from ...errors import ConfigurationError, FaA2AError, ShapeError, UnsupportedError
from ...ops import agreement
from ...ops.arguments import scale_problem, shown
from ...ops.request import grad_problem

_agreed: weakref.WeakKeyDictionary[Group, set[object]] = weakref.WeakKeyDictionary()


def is_needed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, enable_gqa: bool = False
) -> bool:
    if mask is not None:
        return True
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in (q, k, v)):
        return False  # UlyssesAttention refuses it
    if enable_gqa and q.shape[2] % max(k.shape[2], 1) == 0 and k.shape == v.shape:  # which UlyssesAttention groups
        return k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]
    return not k.shape == v.shape == q.shape


class Call(NamedTuple):
    """q (B, s, H, D), k and v (B, t, G, D) of this rank, mask (B, t) or (B or 1, H or 1, 1, t)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    enable_gqa: bool


def attend(call: Call, group: Group, timeout_s: float) -> torch.Tensor:
    """(B, s, H, D).

    Keys and values that are whole on every rank come right, too: gathered they are there P times each, and attention
    over keys repeated equally often is attention over the keys.
    Raises ShapeError, UnsupportedError and PeerMismatchError on every rank.
    """
    _agree(call, group, timeout_s)
    _, _, _, mask, scale, enable_gqa = call
    q, k, v = (collectives.scatter_heads(x, group).transpose(1, 2) for x in call[:3])
    whole = None if mask is None else gather_mask(mask, group)
    with torch.autocast(q.device.type, enabled=False):  # which would change the output's dtype
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=whole, scale=scale, enable_gqa=enable_gqa)
    return collectives.gather_heads(out.transpose(1, 2), group)


def gather_mask(mask: torch.Tensor, group: Group) -> torch.Tensor:
    """A mask over this rank's keys to one over all keys, (B or 1, h or 1, 1, T), in the order of the gathered keys."""
    mask = mask[:, None, None, :] if mask.dim() == 2 else mask
    words = mask.contiguous()
    words = words.view(torch.uint8) if words.dtype == torch.bool else words  # gloo has no booleans
    parts = [torch.empty_like(words) for _ in range(group.size)]
    dist.all_gather(parts, words, group=group.handle)
    whole = torch.cat(parts, dim=-1).view(mask.dtype)
    return whole if whole.shape[1] == 1 else whole.chunk(group.size, dim=1)[group.rank]


def _problem(call: Call, size: int) -> FaA2AError | None:
    """Why no rank can take this call."""
    q, k, v, mask, scale, enable_gqa = call
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            return ShapeError(f"{name} must be a tensor (batch, seq, heads, head_dim), got {_kind(x)}")
    if mask is not None and not isinstance(mask, torch.Tensor):
        return ShapeError(f"a mask must be a tensor or None, got {_kind(mask)}")
    if (refused := scale_problem(scale)) is not None:
        return refused
    if (refused := grad_problem(q, k, v)) is not None:
        return refused
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return ShapeError(
            "k and v must have one shape, and q their batch and head_dim; "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    heads, key_heads = q.shape[2], k.shape[2]
    if heads % size or key_heads % size:
        return ShapeError(f"heads must divide over {size} ranks, got {heads} and {key_heads} of keys; use fewer ranks")
    if heads != key_heads and not (enable_gqa and heads % key_heads == 0):
        return ShapeError(
            f"{heads} query heads and {key_heads} key heads need enable_gqa=True and a whole ratio, got {enable_gqa=}"
        )
    if mask is None:
        return None
    batches, rows = (1, q.shape[0]), k.shape[1]
    fits = mask.dim() == 2 and mask.shape == (q.shape[0], rows)
    if mask.dim() == 4:
        fits = mask.shape[0] in batches and mask.shape[1] in (1, heads) and mask.shape[2:] == (1, rows)
    if not fits:
        return UnsupportedError(
            f"a mask in sequence-parallel attention covers this rank's {rows} keys, ({q.shape[0]}, {rows}) or "
            f"({q.shape[0]} or 1, {heads} or 1, 1, {rows}), sharded as they are; got {tuple(mask.shape)}; shard it in "
            "the context-parallel plan"
        )
    return None


def _kind(x: object) -> object:
    """What ranks compare of a tensor, or of what is none."""
    return (tuple(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else type(x).__name__


def _agree(call: Call, group: Group, timeout_s: float) -> None:
    """Collectives on differing shapes hang or mix data up, and so do a collective here and a fused call there; so a
    call's kind is compared when it is first seen."""
    group.check_usable()
    tensors = [x for x in call[:4] if isinstance(x, torch.Tensor)]
    options = {"scale": shown(call.scale), "enable_gqa": bool(call.enable_gqa)}
    kinds = {name: _kind(x) for name, x in zip(call._fields, call[:4])}
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    known = _agreed.setdefault(group, set())
    key = (group.incarnation, grad, *kinds.values(), *options.values())
    on_gpu = any(x.is_cuda for x in tensors)
    if key in known and (on_gpu or group.size == 1):  # between CPU processes each call is compared: see ops/plan.py
        return
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError("a CUDA graph can capture only calls that ran once before; run the model once first")
    error = _problem(call, group.size)
    mine: agreement.Report = {"request": json.dumps(kinds | options), "error": None}
    told = mine if error is None else agreement.report_of(error)
    agreement.agree(group, told, error, lambda: "it attends with a mask, by collectives", timeout_s)
    known.add(key)


@torch.library.custom_op("fa_a2a::masked_ulysses_attention", mutates_args=())
def operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    group: str,
    scale: float,
    enable_gqa: bool,
    timeout_s: float,
) -> torch.Tensor:
    """`attend` for torch.compile; group: name of a process group."""
    return attend(Call(q, k, v, mask, scale, enable_gqa), resolve(group), timeout_s).contiguous()


@operator.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    group: str,
    scale: float,
    enable_gqa: bool,
    timeout_s: float,
) -> torch.Tensor:
    return q.new_empty(q.shape)
