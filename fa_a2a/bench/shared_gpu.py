"""Collectives between ranks that share a GPU: gloo's, since NCCL takes one rank for each GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_kept: list[Any] = []  # a library's implementations end with it


def mend_gloo() -> None:
    """Gives CUDA tensors a functional all-gather that works: gloo's own reads them as host memory and crashes
    (pytorch/pytorch#152645, torch 2.11). diffusers gathers a model's output so."""
    if _kept:
        return
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("all_gather_into_tensor", _all_gather, "CUDA")  # type: ignore[no-untyped-call]
    _kept.append(library)


def _all_gather(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    group = torch._C._distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    own = x.cpu().contiguous()
    parts = [torch.empty_like(own) for _ in range(group_size)]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts).to(x.device)
