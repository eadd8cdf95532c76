"""Kernel 'fa4': flash-attn-4's forward kernel, writing the exchange's output layout through strides.

O is described to the kernel as a tensor whose batch mode is the peer: chunk c at its owner's buffer, one equal stride
apart. Peers that do not lie at equal strides take one launch for each run of equal ones. The fused kernel is
persistent, paces its stores and ends the call itself. Its sm_100 form is compiled, not run; 'auto' leaves it alone
(kernels.verified).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..comm.symmetric import Release
from .kernels import Sink, loadable
from .pace import slice_pace_ns


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
        from fa4_a2a.forward import forward_tile_rows, load_forward
        from fa4_a2a.persistent import ARCHS, PERSISTENT_TILES, Build, load_persistent

        properties = torch.cuda.get_device_properties(device)
        arch = f"sm_{properties.major}{properties.minor}a"
        name, self.num_sms = str(dtype).removeprefix("torch."), properties.multi_processor_count
        self.tile_rows = forward_tile_rows(head_dim, arch, tile)
        self.can_release = arch in ARCHS and head_dim in PERSISTENT_TILES and not causal
        self.heads_per_kv = heads_per_kv
        self._forward = load_forward(
            head_dim, name, arch, self.num_sms, tile=tile, with_lse=with_lse, heads_per_kv=heads_per_kv
        )
        if causal:
            self._causal = load_forward(head_dim, name, arch, self.num_sms, tile, with_lse, heads_per_kv, causal=True)
        if fused and self.can_release:
            build = Build(release=True)
            self._slice_rows = build.slice_rows
            self._persistent = load_persistent(
                head_dim, name, arch, self.num_sms, tile, with_lse, heads_per_kv, build=build
            )
        self._made_for = (device, dtype, head_dim, with_lse, arch)

    def alternatives(self) -> dict[str, _FA4]:
        """The same kernel with the tiles that could be better for attention alone; the sweep compares with the best."""
        from fa4_a2a.forward import FORWARD_TILES

        device, dtype, head_dim, with_lse, arch = self._made_for
        tiles = FORWARD_TILES[arch, head_dim][1:2]
        return {f"{rows}x{keys}": _FA4(device, dtype, head_dim, with_lse, tile=(rows, keys)) for rows, keys in tiles}

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
            self._forward(q, k, v, o, lse, scale)
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
            self._forward(q[:, rest], k, v, o[:, rest], None if lse is None else lse[:, :, rest], scale)

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
        if release is None or not self.can_release:
            return [partial(self._forward, *call) for call in calls]
        tile = (self.tile_rows, k.shape[1], head_dim, q.itemsize)
        pace_ns = slice_pace_ns(*tile, self.num_sms, self._slice_rows, self._made_for[-1])
        ends = [release._replace(flags=0)] * (len(calls) - 1) + [release]
        return [partial(self._persistent, *call, pace_ns, end) for call, end in zip(calls, ends)]


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
