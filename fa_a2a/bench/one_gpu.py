"""What the benchmarks of attention kernels on one GPU have in common: inputs, timing, and the way through the cases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from tqdm import tqdm

from ..ops.kernels import Qkv
from . import record
from .timing import Method, calls_per_round, interleaved

Tick = Callable[[], object]
Line = dict[str, Any]


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


_Case = TypeVar("_Case", bound=Case)


def run(
    cases: Sequence[_Case],
    title: Callable[[_Case], str],
    measure: Callable[[_Case, Tick], list[Line]],
    row: Callable[[Line], str],
    out: Path,
) -> None:
    """Appends the lines of each case to `out` and prints a row for each, under a bar that `measure` ticks."""
    with tqdm(total=sum(c.rounds + 1 for c in cases), leave=False, unit="round", file=sys.stderr) as bar:
        for case in cases:
            bar.set_description(title(case), refresh=False)
            lines = measure(case, bar.update)
            record.append(out, lines)
            for line in lines:
                bar.write(row(line), file=sys.stdout)
            sys.stdout.flush()


def draw(case: Case, device: torch.device) -> Qkv:
    """q, k, v (1, seq_len, local_heads, head_dim), the same in every run."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (1, case.seq_len, case.local_heads, case.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(getattr(torch, case.dtype)) for _ in range(3))
    return q, k, v


def times(
    calls: Mapping[str, Callable[[], object]], case: Case, device: torch.device, tick: Tick
) -> tuple[dict[str, list[float]], int]:
    """us per call of each method in each round, and how many calls a round times at once: of the first one's length."""
    count = calls_per_round(next(iter(calls.values())), device)
    methods = {name: Method(call) for name, call in calls.items()}
    align = partial(torch.cuda.synchronize, device)
    return interleaved(methods, rounds=case.rounds, calls=count, device=device, align=align, tick=tick), count
