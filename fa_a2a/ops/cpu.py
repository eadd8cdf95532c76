"""Kernel 'cpu': tiled attention with online softmax that stores each finished tile to its owner.

The CPU counterpart of the GPU kernels, for correctness and for machines without a GPU: the same tiles, order and views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange

from ..layout import tile_order
from .kernels import Sink

TILE_ROWS = 64
KEY_TILE = 256


def attention_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal_from: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One tile: q (rows, D), k and v (S, D) float32; returns O (rows, D) and LSE (rows,) in float32.

    causal_from: the last key that row 0 sees, row i seeing i more; None: all see all.
    Rows are padded to TILE_ROWS: a matrix product may sum in another order for another number of rows, and the serial
    and the fused path must agree to the bit.
    """
    rows = q.shape[0]
    padded = q.new_zeros(TILE_ROWS, q.shape[1])
    padded[:rows] = q
    padded *= scale
    top = q.new_full((TILE_ROWS, 1), float("-inf"))  # largest score so far
    total = q.new_zeros(TILE_ROWS, 1)  # sum of exp(score - top)
    acc = q.new_zeros(TILE_ROWS, v.shape[1])
    for at in range(0, k.shape[0], KEY_TILE):
        scores = padded @ k[at : at + KEY_TILE].T
        if causal_from is not None:
            beyond = torch.arange(at, at + scores.shape[1]) > causal_from + torch.arange(TILE_ROWS)[:, None]
            scores.masked_fill_(beyond, float("-inf"))
        new_top = torch.maximum(top, scores.amax(1, keepdim=True))
        rescale = torch.exp(top - new_top)
        weights = torch.exp(scores - new_top)
        total = total * rescale + weights.sum(1, keepdim=True)
        acc = acc * rescale + weights @ v[at : at + KEY_TILE]
        top = new_top
    return (acc / total)[:rows], (top + torch.log(total))[:rows, 0]


@torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]  # which would multiply in bfloat16
def attention_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    o: Sequence[torch.Tensor],
    lse: Sequence[torch.Tensor] | None,
    causal_from: int | None = None,
) -> None:
    """q: (C, rows, h, D) in chunk order; k, v: (S, h, D). Stores chunk c to o[c] (rows, h, D) and lse[c] (h, rows).
    causal_from: of the first row, where the chunks follow each other in the sequence."""
    chunks, rows, heads, _ = q.shape
    keys, values = k.transpose(0, 1).float(), v.transpose(0, 1).float()
    keys, values = keys.contiguous(), values.contiguous()
    for tile in tile_order(chunks, heads, rows, TILE_ROWS):
        span = slice(tile.row, tile.row + tile.rows)
        sees = None if causal_from is None else causal_from + tile.chunk * rows + tile.row
        queries = q[tile.chunk, span, tile.head].float()
        out, row_lse = attention_tile(queries, keys[tile.head], values[tile.head], scale, sees)
        o[tile.chunk][span, tile.head] = out.to(q.dtype)
        if lse is not None:
            lse[tile.chunk][tile.head, span] = row_lse


class _CpuKernel:
    name = "cpu"
    can_fuse = True
    can_release = False

    def local(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        chunks: int,
        with_lse: bool,
        causal_from: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, seq, heads, _ = q.shape
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(batch, heads, seq, dtype=torch.float32)
        for b in range(batch):
            attention_chunks(
                rearrange(q[b], "(c s) h d -> c s h d", c=chunks),
                k[b],
                v[b],
                scale,
                o[b].chunk(chunks),
                lse[b].chunk(chunks, dim=1),
                causal_from,
            )
        return o, lse if with_lse else None

    def fused(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: Sink,
        with_lse: bool,
        causal_from: int | None = None,
    ) -> None:
        for b in range(q.shape[0]):
            attention_chunks(
                rearrange(q[b], "(c s) h d -> c s h d", c=len(sink.o)),
                k[b],
                v[b],
                scale,
                [o[b] for o in sink.o],
                [lse[b] for lse in sink.lse] if with_lse else None,
                causal_from,
            )


def make(device: torch.device, dtype: torch.dtype, head_dim: int, with_lse: bool, fused: bool) -> _CpuKernel:
    return _CpuKernel()
