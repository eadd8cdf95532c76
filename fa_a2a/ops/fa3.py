"""Kernel 'fa3': the C++ forward of csrc/fa3_a2a, on sm_90. It takes the chunks' addresses as a table, so one launch
serves all owners and batch entries wherever they lie; it paces its stores and ends the call itself.

A head_dim with more than one tile has an object for each, and a launch takes the one whose waves of tiles end first
(xstage/tiles.py). All of them compute the same bits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..comm.symmetric import Release
from ..native.build import SLICE_ROWS, Variant, load
from ..xstage.tiles import FA3_TILES, Tile, quickest
from .kernels import Sink, loadable
from .pace import slice_pace_ns

OWN_LAST = 1  # params.cuh's Order


class FA3:
    name = "fa3"
    can_fuse = True
    can_release = True

    def __init__(
        self, device: torch.device, head_dim: int, dtype: str, tiles: Sequence[Tile], output: str = "staged"
    ) -> None:
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._forward = {t: load(Variant(head_dim, dtype, (t.rows, t.keys), output)) for t in tiles}
        self._paced = output == "staged"
        self._silent = _arguments(Release.none(device))
        self._one = _OneChunk()

    def tile(self, rows: int, heads: int) -> Tile:
        """Of a launch over so many rows of queries in each chunk, and heads of all chunks and batch entries."""
        return quickest(tuple(self._forward), rows=rows, heads=heads, num_sms=self.num_sms)

    def _tile(self, chunks: torch.Tensor) -> Tile:
        """For q (B, chunks, rows, h, D)."""
        batch, count, rows, heads, _ = chunks.shape
        return self.tile(rows, batch * count * heads)

    def local(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, chunks: int, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A row's bits depend neither on where its tile begins nor on the tile: `chunks` is not needed."""
        q, k, v = (loadable(t) for t in (q, k, v))
        if scale < 0:
            q, scale = -q, -scale
        batch, seq, heads, _ = q.shape
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, heads, seq, dtype=torch.float32, device=q.device) if with_lse else None
        one = q.unsqueeze(1)
        forward = self._forward[self._tile(one)]
        forward(one, k, v, o, self._one.at(o, lse), lse, scale, 0, OWN_LAST, self.num_sms, *self._silent)
        return o, lse

    def fused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sink: Sink, with_lse: bool
    ) -> None:
        for launch in self.launches(q, k, v, scale, sink, with_lse, None):
            launch()

    def launches(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: Sink,
        with_lse: bool,
        release: Release | None,
    ) -> list[Callable[[], None]]:
        """The one launch of a call, which may be repeated. It ends the call as `release` says."""
        q, k, v = loadable(q), loadable(k), loadable(v)
        batch, seq, heads, head_dim = q.shape
        chunks = q.view(batch, len(sink.o), seq // len(sink.o), heads, head_dim)
        outputs = _outputs(sink.o, sink.lse if with_lse else ())
        tile, pace_ns = self._tile(chunks), 0
        if self._paced:
            pace_ns = slice_pace_ns(tile.rows, k.shape[1], head_dim, q.itemsize, self.num_sms, SLICE_ROWS)
        end = _arguments(release) if release is not None else self._silent
        forward = self._forward[tile]
        rest = (k, v, *outputs, abs(scale), pace_ns, OWN_LAST, self.num_sms, *end)
        if scale < 0:  # what is in q then comes with each launch
            return [lambda: forward(-chunks, *rest)]
        return [partial(forward, chunks, *rest)]


class _OneChunk(threading.local):
    """The table of addresses of an output in one piece, written anew for each call, which has read it when it returns.
    Kept, since making a tensor costs the host time."""

    def __init__(self) -> None:
        self._table = torch.zeros(2, 1, dtype=torch.int64)
        self._words = (ctypes.c_int64 * 2).from_address(self._table.data_ptr())

    def at(self, o: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
        self._words[0] = o.data_ptr()
        self._words[1] = 0 if lse is None else lse.data_ptr()
        return self._table


def _outputs(
    o: tuple[torch.Tensor, ...], lse: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One chunk's O for its strides, all chunks' addresses, one chunk's LSE for its strides."""
    addresses = [[t.data_ptr() for t in o], [t.data_ptr() for t in lse] or [0] * len(o)]
    return o[0], torch.tensor(addresses, dtype=torch.int64), lse[0] if lse else None


def _arguments(release: Release) -> tuple[Any, ...]:
    """In the kernel's order."""
    words = (release.rank, release.num_ranks, int(release.flags), release.deadline_ns, release.record)
    return (release.peer_blocks, release.counter, *words)


def make(device: torch.device, dtype: torch.dtype, head_dim: int, with_lse: bool, fused: bool) -> FA3:
    return FA3(device, head_dim, str(dtype).removeprefix("torch."), FA3_TILES[head_dim])
