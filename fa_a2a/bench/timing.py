"""Interleaved timing: every method once a round, because clocks drift by 5-10 % within a minute of full load."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm.symmetric import SymmetricBlock, SymmetricMemory
from ..layout import Word
from .clock import Clock

Times = dict[str, list[float]]
TARGET_ROUND_US = 6000.0  # length of a timed region: long against launch jitter, short against clock drift

# two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; 1.96 beyond
_T95 = (
    *(12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Method:
    """`call` is timed; `after` runs behind the timed region of a round, for what a method leaves open."""

    call: Callable[[], object]
    after: Callable[[], object] = lambda: None


def interleaved(
    methods: dict[str, Method],
    *,
    rounds: int,
    calls: int,
    device: torch.device,
    align: Callable[[], object],
    tick: Callable[[], object] = lambda: None,
    clocks: Times | None = None,
) -> Times:
    """Microseconds per call of each method: one value a round, the maximum over ranks. The first round is dropped.

    Each round has an order of its own, the same on every rank: what runs behind an idle pause or a cooler method finds
    a faster chip, and in a fixed order that would be the same method's advantage in every round.

    align: makes the ranks' streams start together. clocks: on GPUs it is given the SM clock of the rank with the
    slowest one, in MHz, likewise by round. That clock goes with the largest time: such a rank is the last to finish
    what ranks do alone, and the one that others wait for in what they do together. Collective over the default group.
    """
    clock = None
    if clocks is not None and device.type == "cuda":
        clock = Clock(device)
        dist.barrier()  # compiling it took the ranks apart, and a wait inside a kernel has its deadline
    times: Times = {name: [] for name in methods}
    for index in range(rounds + 1):
        names = list(methods)
        random.Random(index).shuffle(names)
        for name in names:
            method = methods[name]
            method.call()
            method.after()
            _wait(device)
            dist.barrier()
            align()
            if clock is not None:
                clock.start()
            us, mhz = _time(method.call, calls, device), 0.0
            if clock is not None:
                clock.stop()
                mhz = clock.mhz()
            found = torch.tensor([us, -mhz], dtype=torch.float64, device=device)
            method.after()
            _wait(device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            if index:
                us, mhz = found.tolist()
                times[name].append(us)
                if clock is not None and clocks is not None:
                    clocks.setdefault(name, []).append(-mhz)
        tick()
    return times


def rounded(times: Times, digits: int = 2) -> Times:
    """As lines record them."""
    return {name: [round(x, digits) for x in values] for name, values in times.items()}


def meet(memory: SymmetricMemory, signals: SymmetricBlock) -> None:
    """Makes the ranks' streams go on together."""
    memory.signal(signals, Word.READY, advance=True, publish=True, wait=True)


def calls_per_round(call: Callable[[], object], device: torch.device) -> int:
    """How many calls of this length a timed region has, the same on every rank. Collective over the default group."""
    call()
    us = torch.tensor([_time(call, 1, device)], dtype=torch.float64, device=device)
    dist.all_reduce(us, op=dist.ReduceOp.MAX)
    if device.type != "cuda":
        return 1
    # long calls one by one: what is compared should lie close together in time, since the clocks drift
    return min(40, math.ceil(TARGET_ROUND_US / us.item()))


def _time(call: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) * 1e6 / calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None]:
    """Median of a - b, round by round, and half the width of the mean's 95 % interval; None from one round."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    n = len(differences)
    if n < 2:
        return differences[0], None
    quantile = _T95[n - 2] if n - 2 < len(_T95) else 1.96
    return statistics.median(differences), quantile * statistics.stdev(differences) / math.sqrt(n)
