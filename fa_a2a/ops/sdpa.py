"""Kernel 'torch': scaled_dot_product_attention. Runs wherever torch does; cannot store into other ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import UnsupportedError
from .kernels import Sink


class _Sdpa:
    name = "torch"
    can_fuse = False
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
        """causal_from: 0 or None; torch's causal mask, too, lets query i see keys 0 to i, however many there are."""
        assert not causal_from
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        causal = causal_from is not None
        if scale <= 0:  # torch's CPU kernel masks scores before it scales them: -inf times this is NaN or inf
            q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        with torch.autocast(q.device.type, enabled=False):  # which would change the output's dtype
            o = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)
        return o.transpose(1, 2), None

    def fused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sink: Sink, with_lse: bool
    ) -> None:
        raise UnsupportedError("kernel 'torch' cannot store into other ranks; use exchange='collective'")


def make(device: torch.device, dtype: torch.dtype, head_dim: int, with_lse: bool, fused: bool) -> _Sdpa:
    return _Sdpa()
