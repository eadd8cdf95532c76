"""NVTX ranges around the steps of a call, for Nsight Systems; nothing on CPUs."""

from __future__ import annotations

import contextlib

import torch


def step(name: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Range `fa_a2a.<name>` on the host's timeline while the step is enqueued."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.nvtx.range(f"fa_a2a.{name}")
