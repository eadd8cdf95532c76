"""Kernel 'fa4': flash-attn-4's forward kernel, writing the exchange's output layout through strides.

O is described to the kernel as a tensor whose batch mode is the peer: chunk c at its owner's buffer, one equal stride
apart. Peers that do not lie at equal strides take one launch for each run of equal ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .kernels import Sink, loadable


class _FA4:
    name = "fa4"
    can_fuse = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        with_lse: bool,
        tile: tuple[int, int] | None = None,
    ) -> None:
        from fa4_a2a.forward import forward_tile_rows, load_forward

        properties = torch.cuda.get_device_properties(device)
        arch = f"sm_{properties.major}{properties.minor}a"
        name, num_sms = str(dtype).removeprefix("torch."), properties.multi_processor_count
        self.tile_rows = forward_tile_rows(head_dim, arch, tile)
        self._forward = load_forward(head_dim, name, arch, num_sms, tile=tile, with_lse=with_lse)
        self._made_for = (device, dtype, head_dim, with_lse, arch)

    def alternatives(self) -> dict[str, _FA4]:
        """The same kernel with the tiles that could be better for attention alone; the sweep compares with the best."""
        from fa4_a2a.forward import FORWARD_TILES

        device, dtype, head_dim, with_lse, arch = self._made_for
        tiles = FORWARD_TILES[arch, head_dim][1:2]
        return {f"{rows}x{keys}": _FA4(device, dtype, head_dim, with_lse, (rows, keys)) for rows, keys in tiles}

    def local(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, chunks: int, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (loadable(t) for t in (q, k, v))
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        batch, seq, heads, _ = q.shape
        lse = torch.empty(batch, heads, seq, dtype=torch.float32, device=q.device) if with_lse else None
        self._forward(q, k, v, o, lse, scale)
        return o, lse

    def fused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sink: Sink, with_lse: bool
    ) -> None:
        for launch in self.launches(q, k, v, scale, sink, with_lse):
            launch()

    def launches(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sink: Sink, with_lse: bool
    ) -> list[Callable[[], None]]:
        """The launches of one call, one for each batch entry and run of equal strides; each may be repeated."""
        q, k, v = loadable(q), loadable(k), loadable(v)
        batch, seq, heads, head_dim = q.shape
        chunks = q.view(batch, len(sink.o), seq // len(sink.o), heads, head_dim)
        return [
            partial(
                self._forward,
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


def make(device: torch.device, dtype: torch.dtype, head_dim: int, with_lse: bool) -> _FA4:
    return _FA4(device, dtype, head_dim, with_lse)
