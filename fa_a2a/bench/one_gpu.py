"""What the benchmarks of attention kernels on one GPU have in common: inputs and timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from ..ops.kernels import Qkv
from . import draws
from .progress import Tick
from .timing import Method, calls_per_round, interleaved


class Case(Protocol):
    """A row: attention over seq_len tokens and the heads of one rank."""

    @property
    def seq_len(self) -> int: ...
    @property
    def local_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def rounds(self) -> int: ...


def draw(case: Case, device: torch.device) -> Qkv:
    """q, k, v (1, seq_len, local_heads, head_dim), the same in every run."""
    shape = (1, case.seq_len, case.local_heads, case.head_dim)
    return draws.qkv(shape, getattr(torch, case.dtype), device, seed=1)


def times(
    calls: Mapping[str, Callable[[], object]], case: Case, device: torch.device, tick: Tick
) -> tuple[dict[str, list[float]], int]:
    """us per call of each method in each round, and how many calls a round times at once: of the first one's length."""
    count = calls_per_round(next(iter(calls.values())), device)
    methods = {name: Method(call) for name, call in calls.items()}
    align = partial(torch.cuda.synchronize, device)
    return interleaved(methods, rounds=case.rounds, calls=count, device=device, align=align, tick=tick), count
