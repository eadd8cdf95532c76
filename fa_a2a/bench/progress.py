"""The way through a benchmark's cases: each one's lines are written and shown as soon as it is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from . import record

Tick = Callable[[], object]
Line = dict[str, Any]


class Case(Protocol):
    @property
    def rounds(self) -> int: ...


_Case = TypeVar("_Case", bound=Case)


def run(
    cases: Sequence[_Case],
    title: Callable[[_Case], str],
    measure: Callable[[_Case, Tick], list[Line]],
    shown: Callable[[list[Line]], Iterable[str]],
    out: Path,
    *,
    main: bool = True,
    series: int = 1,
) -> list[Line]:
    """All lines. Those of each case are appended to `out`, and printed as `shown` makes text of them, under a bar that
    `measure` ticks; by one rank, `main`, of those that measure together. series: measurements of a case, each of its
    rounds and one more."""
    found = []
    steps = series * sum(case.rounds + 1 for case in cases)
    with tqdm(total=steps, disable=not main, leave=False, unit="round", file=sys.stderr) as bar:
        for case in cases:
            bar.set_description(title(case))
            lines = measure(case, bar.update)
            found += lines
            if main:
                record.append(out, lines)
                for text in shown(lines):
                    bar.write(text, file=sys.stdout)
                sys.stdout.flush()
    return found
