"""A call cut into pieces that every kernel takes: full attention, as many K/V heads as query heads, one key length.

    key lengths   one piece for each batch entry, K and V narrowed: no kernel needs a mask, no key is loaded in vain
    GQA           one piece for each K/V head, which its query heads share at stride 0, unless the kernel groups heads
    causal        on the fused path one for each span of each chunk, whose place in the sequence says what it sees

A dense call is one piece, the whole. The serial path cuts in the same way, so the two agree to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..layout import ExchangeShape
from .kernels import AttentionKernel, Qkv, Sink

ALL = slice(None)


@dataclass(frozen=True)
class Piece:
    """Of the batch, of this rank's query heads and K/V heads; the first `keys` keys."""

    batch: slice
    heads: slice
    kv_heads: slice
    keys: int

    def of(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Qkv:
        """The piece's views; k and v repeated over the query heads that share them, without a copy."""
        q = q[self.batch, :, self.heads]
        k, v = (t[self.batch, : self.keys, self.kv_heads] for t in (k, v))
        if k.shape[2] == 1 < q.shape[2]:
            k, v = (t.expand(-1, -1, q.shape[2], -1) for t in (k, v))
        return q, k, v

    def into(self, sink: Sink) -> Sink:
        if (self.batch, self.heads) == (ALL, ALL):
            return sink
        return Sink(
            tuple(o[self.batch, :, self.heads] for o in sink.o), tuple(x[self.batch, self.heads] for x in sink.lse)
        )


def heads_per_kv(shape: ExchangeShape, rank: int) -> int:
    """Query heads of each of this rank's K/V heads, for a kernel that groups them. 1 where none is to be built: with
    one K/V head, which all heads share, or where the K/V heads have unequal parts of this rank's query heads."""
    sizes = {heads.stop - heads.start for heads, _ in shape.kv_runs(rank)}
    return sizes.pop() if len(sizes) == 1 and len(shape.kv_ranges[rank]) > 1 else 1


def cut(
    shape: ExchangeShape, rank: int, adapter: AttentionKernel, key_lengths: tuple[int, ...] | None
) -> tuple[Piece, ...]:
    batches = [(ALL, shape.seq_len)]
    if key_lengths is not None:
        batches = [(slice(b, b + 1), keys) for b, keys in enumerate(key_lengths)]
    runs: tuple[tuple[slice, slice], ...] = ((ALL, ALL),)
    if shape.heads_per_kv > 1 and getattr(adapter, "heads_per_kv", 1) == 1 and len(shape.kv_ranges[rank]) > 1:
        runs = shape.kv_runs(rank)
    return tuple(Piece(batch, *run, keys) for batch, keys in batches for run in runs)


def causal_spans(shape: ExchangeShape, owners: tuple[int, ...]) -> Iterator[tuple[int, slice, int]]:
    """(chunk, rows of it, place of the first in the whole sequence) of all that is computed, the own chunk last."""
    for chunk in (*range(1, len(owners)), 0):
        at = 0
        for first, rows in shape.spans(owners[chunk]):
            yield chunk, slice(at, at + rows), first
            at += rows


def narrowed(sink: Sink, chunk: int, rows: slice) -> Sink:
    """One chunk's rows as a sink of one chunk."""
    return Sink((sink.o[chunk][:, rows],), (sink.lse[chunk][:, :, rows],))


def local(
    adapter: AttentionKernel,
    pieces: tuple[Piece, ...],
    qkv: Qkv,
    scale: float,
    chunks: int,
    with_lse: bool,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of the pieces on this rank alone, rows in the order of the sequence: AttentionKernel.local for all."""
    options: dict[str, Any] = {"causal_from": 0} if causal else {}
    if len(pieces) == 1:
        return adapter.local(*pieces[0].of(*qkv), scale, chunks, with_lse, **options)
    batch, rows, heads, head_dim = qkv[0].shape
    o = torch.empty(batch, rows, heads, head_dim, dtype=qkv[0].dtype, device=qkv[0].device)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=o.device) if with_lse else None
    for piece in pieces:
        part, part_lse = adapter.local(*piece.of(*qkv), scale, chunks, with_lse, **options)
        o[piece.batch, :, piece.heads] = part
        if lse is not None and part_lse is not None:
            lse[piece.batch, piece.heads] = part_lse
    return o, lse
