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
import random
import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigurationError
from .designs import KernelDesign
from .platform import PlatformProfile, StoreName
from .shape import AttentionShape

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


@dataclass(frozen=True)
class AttentionRun:
    """Result of simulate_attention, in us."""

    end_us: float
    """The last tile is computed and taken by the path."""
    local_us: float
    """The same with all stores local."""
    tail_us: float
    """How long the last remote byte is under way behind the end."""
    peak_bytes: float
    longest_wait_us: float
    """Of one tile's stores together, beyond what they take on an empty path."""
    arrived_us: dict[int, float]
    """By owner (its distance from the sender, 1 to P - 1): when its last byte has arrived."""

    @property
    def cost_us(self) -> float:
        """What remote stores add until the kernel has ended, which it does when its stores are done."""
        return self.end_us + self.tail_us - self.local_us


def simulate_attention(
    shape: AttentionShape,
    profile: PlatformProfile,
    kernel: KernelDesign,
    *,
    store: StoreName = "bulk",
    spread: float = 0.0,
    seed: int = 0,
) -> AttentionRun:
    """One launch of the kernel on one rank, every rank alike. The path holds the middle of the capacity's range.

    spread: tiles' times vary uniformly by this share of the Q-loop to both sides; 0 is the worst case, all in step.
    """
    if not 0 <= spread < 1:
        raise ConfigurationError(f"spread is a share of a tile's time, at least 0 and below 1; got {spread!r}")
    profile.check_fits(num_ranks=shape.num_ranks)
    kind = profile.store(store)
    remote, local = (
        _Attention(shape, profile, kernel, kind.issue_us, spread, seed, is_remote) for is_remote in (True, False)
    )
    path = Path(profile.rate_gb_s, kind.capacity.middle_bytes)
    end_us = run(remote.blocks(), path)
    local_us = run(local.blocks(), Path(profile.rate_gb_s))
    return AttentionRun(
        end_us=end_us,
        local_us=local_us,
        tail_us=max(0.0, max(path.arrived_us.values(), default=0.0) - end_us),
        peak_bytes=path.peak_bytes,
        longest_wait_us=max(remote.waits_us, default=0.0),
        arrived_us=dict(path.arrived_us),
    )


class _Attention:
    """The blocks of one launch as senders."""

    def __init__(
        self,
        shape: AttentionShape,
        profile: PlatformProfile,
        kernel: KernelDesign,
        issue_us: float,
        spread: float,
        seed: int,
        remote: bool,
    ) -> None:
        speed = profile.attention
        sigma_us = speed.key_tile_us(
            tile_rows=shape.tile_rows, key_tile=shape.key_tile, head_dim=shape.head_dim, num_sms=profile.num_sms
        )
        self.shape, self.kernel, self.issue_us, self.remote = shape, kernel, issue_us, remote
        self.num_sms, gap_us = profile.num_sms, shape.key_tiles * sigma_us
        chance = random.Random(seed)
        chunks = [*range(1, shape.num_ranks), 0] if kernel.own_chunk == "last" else [*range(shape.num_ranks)]
        self.owners = [chunk for chunk in chunks for _ in range(shape.chunk_tiles)]
        self.times_us = [gap_us * (1 + spread * chance.uniform(-1, 1)) for _ in self.owners]
        leave_us = 0.0
        if kernel.headroom is not None:
            wave_us = profile.num_sms * shape.tile_bytes / profile.rate_gb_s / 1e3
            leave_us = min(kernel.headroom * wave_us, gap_us / 2)
        self.pause_us = leave_us / SLICES
        self.waits_us: list[float] = []

    def blocks(self) -> list[Sender]:
        if not self.kernel.staged:
            queue = iter(range(len(self.owners)))
            return [self._leaving(lambda: next(queue, None)) for _ in range(self.num_sms)]
        every = range(len(self.owners))
        return [self._staying(every[sm :: self.num_sms]) for sm in range(self.num_sms)]

    def _leaving(self, take: Callable[[], int | None]) -> Sender:
        """An SM that runs one block after another; each waits for its store before it leaves."""
        now_us = 0.0
        while (tile := take()) is not None:
            now_us = yield At(now_us + self.times_us[tile])
            if self.remote and self.owners[tile]:
                begin_us = now_us
                now_us = yield from burst(now_us, self.shape.tile_bytes, self.issue_us, SLICES, self.owners[tile])
                self.waits_us.append(now_us - begin_us - self.issue_us)
            else:
                now_us = yield At(now_us + self.issue_us)

    def _staying(self, tiles: Sequence[int]) -> Sender:
        """A block that stays: each tile leaves, slice by slice, while the next one is computed, whose loads wait as
        long as a slice does. The last one leaves at once."""
        now_us, staged = 0.0, None
        for tile in [*tiles, None]:
            begin_us, late_us = now_us, 0.0
            if staged is not None and self.remote and self.owners[staged]:
                for _ in range(SLICES):
                    taken_us = yield Send(self.shape.tile_bytes / SLICES, self.owners[staged])
                    late_us += taken_us - now_us
                    if tile is not None and self.pause_us:
                        now_us = yield At(taken_us + self.pause_us)
                    else:
                        now_us = taken_us
                self.waits_us.append(late_us)
            if tile is None:
                return
            now_us = yield At(max(now_us, begin_us + self.times_us[tile] + late_us))
            staged = tile
