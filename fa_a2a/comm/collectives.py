"""The two exchanges through torch.distributed: the reference, the fallback, and what is compared with.

With equal shards and heads each is one permute and one all-to-all of equal parts. Otherwise the parts have sizes of
their own; replicated text is not sent before attention, and after it each rank sends its heads of it to all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from einops import rearrange

from ..layout import ExchangeShape
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


def scatter_unequal(x_BsHD: torch.Tensor, heads: tuple[range, ...], shape: ExchangeShape, group: Group) -> torch.Tensor:
    """scatter_heads for shards or heads that are not equal: `heads` goes to each rank, overlaps allowed."""
    rank, own = group.rank, x_BsHD[:, shape.own_rows(group.rank)]
    mine = heads[rank]
    sizes = [(x_BsHD.shape[0], rows, len(mine), x_BsHD.shape[3]) for rows in shape.sizes]
    parts = _all_to_all_parts([own[:, :, _slice(h)] for h in heads], sizes, group)
    if shape.text is not None:
        text = x_BsHD[:, shape.text_place(rank), _slice(mine)]
        parts = [text, *parts] if shape.text_rows > 0 else [*parts, text]
    return torch.cat(parts, 1)


def gather_unequal(x_BShD: torch.Tensor, shape: ExchangeShape, group: Group) -> torch.Tensor:
    """gather_heads for shards or heads that are not equal: each rank gets the rows it holds, text included."""
    send = [torch.cat([x_BShD[:, at : at + n] for at, n in shape.spans(p)], 1) for p in range(group.size)]
    rows, (batch, _, _, dim) = shape.rows(group.rank), x_BShD.shape
    return torch.cat(_all_to_all_parts(send, [(batch, rows, len(h), dim) for h in shape.head_ranges], group), 2)


def gather_lse_unequal(lse_BhS: torch.Tensor, shape: ExchangeShape, group: Group) -> torch.Tensor:
    """gather_lse for shards or heads that are not equal."""
    send = [torch.cat([lse_BhS[:, :, at : at + n] for at, n in shape.spans(p)], 2) for p in range(group.size)]
    rows, batch = shape.rows(group.rank), lse_BhS.shape[0]
    return torch.cat(_all_to_all_parts(send, [(batch, len(h), rows) for h in shape.head_ranges], group), 1)


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _all_to_all(send: torch.Tensor, group: Group) -> torch.Tensor:
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group.handle)
    return received


def _all_to_all_parts(send: list[torch.Tensor], shapes: Sequence[tuple[int, ...]], group: Group) -> list[torch.Tensor]:
    """send[p] goes to rank p; returns what each rank sent here, of the given shapes."""
    outgoing, incoming = [t.numel() for t in send], [torch.Size(shape).numel() for shape in shapes]
    received = send[0].new_empty(sum(incoming))
    dist.all_to_all_single(received, torch.cat([t.reshape(-1) for t in send]), incoming, outgoing, group=group.handle)
    parts = torch.split(received, incoming)
    return [part.view(shape) for part, shape in zip(parts, shapes)]
