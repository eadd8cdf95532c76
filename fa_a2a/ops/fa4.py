"""Kernel 'fa4': flash-attn-4's forward kernel, writing the exchange's output layout through strides.

O is described to the kernel as a tensor whose batch mode is the peer: chunk c at its owner's buffer, one equal stride
apart. Peers that do not lie at equal strides take one launch for each run of equal ones. The fused kernel is
persistent, paces its stores and ends the call itself. Its sm_100 form is compiled, not run; 'auto' leaves it alone
(kernels.verified).

A head_dim with more than one tile of the same keys has a kernel for each, and a launch takes the one whose waves of
tiles end first (xstage/tiles.py). They compute the same bits, so the launches of a call may take different ones, and
the fused path another than the serial one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..comm.symmetric import Release
from ..xstage.tiles import FA4_TILES, Tile, quickest
from .kernels import Sink, loadable
from .pace import slice_pace_ns

if TYPE_CHECKING:
    from fa4_a2a.persistent import Forward


class _Built(NamedTuple):
    """The kernels of one tile. tile_rows: what a CTA finishes together."""

    tile_rows: int
    forward: Callable[..., None]
    persistent: Forward | None


class _FA4:
    name = "fa4"
    can_fuse = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        with_lse: bool,
        fused: bool = False,
        tile: tuple[int, int] | None = None,
        heads_per_kv: int = 1,
        causal: bool = False,
    ) -> None:
        from fa4_a2a.forward import forward_tile, forward_tile_rows, load_forward
        from fa4_a2a.persistent import ARCHS, PERSISTENT_TILES, Build, load_persistent

        properties = torch.cuda.get_device_properties(device)
        arch = f"sm_{properties.major}{properties.minor}a"
        name, self.num_sms = str(dtype).removeprefix("torch."), properties.multi_processor_count
        self.can_release = arch in ARCHS and head_dim in PERSISTENT_TILES and not causal
        self.heads_per_kv = heads_per_kv
        choices = FA4_TILES.get(head_dim, ()) if arch == "sm_90a" and tile is None else ()
        self._tiles = choices or (Tile(*forward_tile(head_dim, arch, tile)),)
        build = Build(release=True)
        self._slice_rows = build.slice_rows

        def built(tile: tuple[int, int]) -> _Built:
            common = (head_dim, name, arch, self.num_sms, tile, with_lse, heads_per_kv)
            persistent = load_persistent(*common, build=build) if fused and self.can_release else None
            return _Built(forward_tile_rows(head_dim, arch, tile), load_forward(*common), persistent)

        self._built = {t: built((t.rows, t.keys)) for t in self._tiles}
        self._only = self._built[self._tiles[0]] if len(self._tiles) == 1 else None
        if causal:  # always with the first tile: these differ in length, and waves say little about them
            self._causal = load_forward(head_dim, name, arch, self.num_sms, tile, with_lse, heads_per_kv, causal=True)
        self._made_for = (device, dtype, head_dim, with_lse, arch)

    def alternatives(self, rows: int, heads: int) -> dict[str, _FA4]:
        """The same kernel with each tile that could be better for attention alone than that of a launch over so many
        rows and heads (as `tile` has them), which is not among them. The benchmarks compare with the best."""
        from fa4_a2a.forward import FORWARD_TILES

        device, dtype, head_dim, with_lse, arch = self._made_for
        tiles = FORWARD_TILES[arch, head_dim][:2] if self._only else [(t.rows, t.keys) for t in self._tiles]
        taken = self.tile(rows, heads)
        make = partial(_FA4, device, dtype, head_dim, with_lse, heads_per_kv=self.heads_per_kv)
        return {f"{r}x{k}": make(tile=(r, k)) for r, k in tiles if (r, k) != (taken.rows, taken.keys)}

    def tile(self, rows: int, heads: int) -> Tile:
        """Of a launch over so many rows of queries in each chunk, and heads of all its chunks together."""
        return quickest(self._tiles, rows=rows, heads=heads, num_sms=self.num_sms)

    def _for(self, q: torch.Tensor) -> _Built:
        """For a launch over q (chunks or batch entries, rows, heads, D)."""
        if self._only is not None:
            return self._only
        chunks, rows, heads, _ = q.shape
        return self._built[self.tile(rows, chunks * heads)]

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
        q, k, v = (loadable(t) for t in (q, k, v))
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        batch, seq, heads, _ = q.shape
        lse = torch.empty(batch, heads, seq, dtype=torch.float32, device=q.device) if with_lse else None
        if causal_from is None:
            self._for(q).forward(q, k, v, o, lse, scale)
        else:
            self._causal_rows(q, k, v, o, lse, scale, causal_from)
        return o, lse

    def _causal_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
        causal_from: int,
    ) -> None:
        """The kernel lets the last row see all keys, so K and V end where the last row does; rows that see all keys
        there are (key lengths) take the dense kernel."""
        edge = min(q.shape[1], k.shape[1] - causal_from)
        if edge > 0:
            keys, first = slice(0, causal_from + edge), slice(0, edge)
            part = None if lse is None else lse[:, :, first]
            self._causal(q[:, first], k[:, keys], v[:, keys], o[:, first], part, scale)
        if (rest := slice(max(edge, 0), None)).start < q.shape[1]:
            dense = self._for(q[:, rest]).forward
            dense(q[:, rest], k, v, o[:, rest], None if lse is None else lse[:, :, rest], scale)

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
        """causal_from: for a sink of one chunk."""
        if causal_from is not None:
            q, k, v = loadable(q), loadable(k), loadable(v)
            self._causal_rows(q, k, v, sink.o[0], sink.lse[0] if with_lse else None, scale, causal_from)
            return
        for launch in self.launches(q, k, v, scale, sink, with_lse, Release.none(q.device)):
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
        """The launches of one call, one for each batch entry and run of equal strides; each may be repeated. The last
        one ends the call as `release` says."""
        q, k, v = loadable(q), loadable(k), loadable(v)
        batch, seq, heads, head_dim = q.shape
        chunks = q.view(batch, len(sink.o), seq // len(sink.o), heads, head_dim)
        calls = [
            (
                chunks[b, run.start : run.start + run.length],
                k[b].expand(run.length, -1, -1, -1),
                v[b].expand(run.length, -1, -1, -1),
                o[b],
                lse[b] if with_lse else None,
                scale,
            )
            for run, o, lse in sink.by_run
            for b in range(batch)
        ]
        built = [self._for(call[0]) for call in calls]
        if release is None or not self.can_release:
            return [partial(b.forward, *call) for b, call in zip(built, calls)]
        rest = (k.shape[1], head_dim, q.itemsize, self.num_sms, self._slice_rows, self._made_for[-1])
        ends = [release._replace(flags=0)] * (len(calls) - 1) + [release]
        launches: list[Callable[[], None]] = []
        for b, call, end in zip(built, calls, ends):
            assert b.persistent is not None, "the adapter was made for fused calls"
            launches.append(partial(b.persistent, *call, slice_pace_ns(b.tile_rows, *rest), end))
        return launches


def make(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    with_lse: bool,
    fused: bool,
    heads_per_kv: int = 1,
    causal: bool = False,
) -> _FA4:
    return _FA4(device, dtype, head_dim, with_lse, fused, heads_per_kv=heads_per_kv, causal=causal)
