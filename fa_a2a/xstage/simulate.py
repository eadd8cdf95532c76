"""Event simulation: senders that compute, stage, pace and store, and the path that takes what they store.

A sender is a generator that yields `At(time)` or `Send(bytes, owner)` and gets the time back at which it goes on. The
path drains at R and holds at most Q; what does not fit waits, first come, first served, slice by slice. Nothing else is
assumed, so the closed forms of burst_gap.py come out where their conditions hold:

  one burst in step             max(T0, (V - Q)/R)
  periodic bursts, Q >= R*G     period max(T0 + G, V/R)
  periodic bursts, Q <  R*G     in step the path runs dry in every gap: period G + (V - Q)/R. But service in turn sends
                                the senders on at different times; they drift apart, and the period comes down to the
                                max law. The less of a burst is served in one turn, the longer that takes.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from ..errors import ConfigurationError

SLICES = 8  # of a tile, as the paced kernel sends it


@dataclass(frozen=True)
class At:
    """Go on at this time, in us."""

    us: float


@dataclass(frozen=True)
class Send:
    """Go on when the path has taken these bytes."""

    size_bytes: float
    owner: int = 0


Sender = Generator[At | Send, float, None]


@dataclass
class Path:
    """A rate, and what it holds before a store waits; capacity_bytes None: no limit."""

    rate_gb_s: float
    capacity_bytes: float | None = None
    level_bytes: float = 0.0
    peak_bytes: float = 0.0
    at_us: float = 0.0
    arrived_us: dict[int, float] = field(default_factory=dict)
    """By owner, when its last byte came out of the path."""

    def __post_init__(self) -> None:
        if not self.rate_gb_s > 0 or (self.capacity_bytes is not None and not self.capacity_bytes > 0):
            got = f"rate {self.rate_gb_s!r} GB/s and capacity {self.capacity_bytes!r} bytes"
            raise ConfigurationError(f"a path has a positive rate and capacity, got {got}; None is no limit")

    def take(self, now_us: float, store: Send) -> float:
        """When the store is taken. Stores must be offered in order of time."""
        per_us = self.rate_gb_s * 1e3
        self._drain(max(now_us, self.at_us))
        if self.capacity_bytes is not None:
            excess = self.level_bytes + store.size_bytes - max(self.capacity_bytes, store.size_bytes)
            if excess > 0:
                self._drain(self.at_us + excess / per_us)
        self.level_bytes += store.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.level_bytes)
        self.arrived_us[store.owner] = self.at_us + self.level_bytes / per_us
        return self.at_us

    def _drain(self, until_us: float) -> None:
        self.level_bytes = max(0.0, self.level_bytes - (until_us - self.at_us) * self.rate_gb_s * 1e3)
        self.at_us = until_us


def run(senders: Iterable[Sender], path: Path) -> float:
    """Runs all senders from time 0 to their ends; returns when the last one ended, in us."""
    queue: list[tuple[float, int, Sender, At | Send]] = []

    def go_on(number: int, sender: Sender, now_us: float | None) -> None:
        try:
            step = next(sender) if now_us is None else sender.send(now_us)
        except StopIteration:
            return
        due_us = (now_us or 0.0) if isinstance(step, Send) else step.us
        heapq.heappush(queue, (due_us, number, sender, step))

    end_us = 0.0
    for number, sender in enumerate(senders):
        go_on(number, sender, None)
    while queue:
        now_us, number, sender, step = heapq.heappop(queue)
        if isinstance(step, Send):
            now_us = path.take(now_us, step)
        end_us = max(end_us, now_us)
        go_on(number, sender, now_us)
    return end_us


def burst(
    now_us: float, size_bytes: float, issue_us: float, slices: int, owner: int = 0
) -> Generator[At | Send, float, float]:
    """Stores without pause between slices; each takes its share of the issue time. Returns when the last is issued."""
    for _ in range(slices):
        now_us = yield Send(size_bytes / slices, owner)
        now_us = yield At(now_us + issue_us / slices)
    return now_us


@dataclass(frozen=True)
class Periodic:
    """Result of simulate_periodic."""

    issue_us: tuple[tuple[float, ...], ...]
    """By sender, of each burst."""
    starts_us: tuple[tuple[float, ...], ...]
    end_us: float

    def period_us(self, skip: int = 0) -> float:
        """Start to start, mean of all senders, without the first bursts."""
        return statistics.mean((s[-1] - s[skip]) / (len(s) - 1 - skip) for s in self.starts_us)

    def spread_us(self, number: int) -> float:
        """How far apart the senders begin their burst of that number: 0 in step."""
        at = [starts[number] for starts in self.starts_us]
        return max(at) - min(at)


def simulate_periodic(
    path: Path, *, senders: int, burst_bytes: float, issue_us: float, gap_us: float, bursts: int, slices: int = SLICES
) -> Periodic:
    """`senders` that each store `burst_bytes` and pause `gap_us`, `bursts` times, all from time 0 on. An isolated
    burst is bursts = 1."""
    if min(senders, bursts, slices) < 1 or min(burst_bytes, issue_us, gap_us) < 0:
        raise ConfigurationError("senders, bursts and slices must be at least 1, bytes and times at least 0")
    issued: list[list[float]] = [[] for _ in range(senders)]
    starts: list[list[float]] = [[] for _ in range(senders)]

    def sender(number: int) -> Sender:
        now_us = 0.0
        for _ in range(bursts):
            starts[number].append(now_us)
            end_us = yield from burst(now_us, burst_bytes, issue_us, slices)
            issued[number].append(end_us - now_us)
            now_us = yield At(end_us + gap_us)

    end_us = run(map(sender, range(senders)), path)
    return Periodic(tuple(map(tuple, issued)), tuple(map(tuple, starts)), end_us)
