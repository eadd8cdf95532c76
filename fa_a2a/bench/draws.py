"""Random inputs of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops.kernels import Qkv


def qkv(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Qkv:
    """q, k, v of one shape, the same wherever they are drawn on such a device."""
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype) for _ in range(3))
    return q, k, v
