"""Kernel 'fa4': flash-attn-4's forward kernel, writing the exchange's output layout through strides.

O is described to the kernel as a tensor whose batch mode is the peer: chunk c at its owner's buffer, one equal stride
apart. Peers that do not lie at equal strides take one launch for each run of equal ones.
"""

from __future__ import annotations

import torch
from einops import rearrange

from ..comm.pointer import tensor_at
from ..layout import Run
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
    ) -> list[_Launch]:
        """The launches of one call, one for each batch entry and run of equal strides; each may be repeated."""
        return [
            _Launch(self._forward, _chunks(q, k, v, b, run, len(sink.o)), *_outputs(sink, run, b, with_lse), scale)
            for b in range(q.shape[0])
            for run in sink.runs
        ]


class _Launch:
    def __init__(self, forward, qkv, o, lse, scale) -> None:  # type: ignore[no-untyped-def]
        self._call = (forward, (*qkv, o, lse, scale))

    def __call__(self) -> None:
        forward, arguments = self._call
        forward(*arguments)


def _chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: int, run: Run, chunks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = rearrange(q[b], "(c s) h d -> c s h d", c=chunks)[run.start : run.start + run.length]
    return rows, k[b].expand(run.length, *k.shape[1:]), v[b].expand(run.length, *v.shape[1:])


def _outputs(sink: Sink, run: Run, b: int, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _across(sink.o, run, b), _across(sink.lse, run, b) if with_lse else None


def _across(views: tuple[torch.Tensor, ...], run: Run, b: int) -> torch.Tensor:
    """One tensor over the chunks of a run: the views' layout, and the peers' distance as batch stride."""
    first = views[run.start][b]
    step = views[run.start + 1].data_ptr() - views[run.start].data_ptr() if run.length > 1 else 0
    strides = (step // first.itemsize, *first.stride())
    return tensor_at(first.data_ptr(), (run.length, *first.shape), strides, first.dtype, first.device)


def make(device: torch.device, dtype: torch.dtype, head_dim: int, with_lse: bool) -> _FA4:
    return _FA4(device, dtype, head_dim, with_lse)
