"""The schedules of moe.py as senders of the simulation: bursts into one path, and Linear-2 waiting for Linear-1."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigurationError
from .moe import MoeTimes, Streams, Tile, interleaved, waves
from .simulate import SLICES, At, Path, Sender, burst, run

_POLL_US = 0.05  # between two looks at a row that is not complete
_RATE_GB_S = 717.0  # only V/R counts: V follows from it


@dataclass
class MoeRun:
    """Result of simulate_moe. The lists are of Linear-2 tiles, all instances together, by their place in the instance's
    walk: (number among its Linear-2 tiles, value)."""

    end_us: float = 0.0
    spans_us: list[tuple[int, float]] = field(default_factory=list)
    """Sender-visible time of each tile's stores."""
    starved_us: list[tuple[int, float]] = field(default_factory=list)
    """Wait of each tile for its row of Linear-1."""

    def median_span_us(self, skip: int = 0) -> float:
        return statistics.median(value for number, value in self.spans_us if number >= skip)

    @property
    def total_starved_us(self) -> float:
        return sum(value for _, value in self.starved_us)


def simulate_moe(
    streams: Streams,
    times: MoeTimes,
    *,
    instances: int,
    schedule: Literal["waves", "interleaved"],
    lead: int = 0,
    wave_rows: int = 1,
    capacity_bytes: float | None = None,
) -> MoeRun:
    """One rank's layer. An instance computes a tile's main loop, then stores; both roles of a pair are one sender here.

    As in the Burst-Gap model, a burst and the next main loop follow one another; what staging covers of a span is
    MoeTimes.stall_us. capacity_bytes None: what the longest gap lets drain, so that the path need not run dry.
    """
    if instances < 1:
        raise ConfigurationError(f"instances must be at least 1, got {instances}")
    volume_bytes = times.drain_us * _RATE_GB_S * 1e3
    if capacity_bytes is None:
        capacity_bytes = max(volume_bytes, times.gap_us(schedule) * _RATE_GB_S * 1e3)
    left = [streams.l1_pairs] * streams.rows  # Linear-1 pairs of each row still to come
    found = MoeRun()

    def walk(instance: int) -> Iterator[Tile]:
        if schedule == "interleaved":
            return interleaved(streams, instance=instance, role=0, instances=instances, lead=lead)
        return waves(streams, instance=instance, role=0, instances=instances, wave_rows=wave_rows)

    def sender(instance: int) -> Sender:
        now_us, number = 0.0, 0
        for tile in walk(instance):
            if tile.layer == "L1":
                now_us = yield At(now_us + times.l1_us)
                left[tile.row] -= 1
                continue
            begin_us = now_us
            while left[tile.row]:
                now_us = yield At(now_us + _POLL_US)
            found.starved_us.append((number, now_us - begin_us))
            begin_us = yield At(now_us + times.l2_us)
            now_us = yield from burst(begin_us, volume_bytes / instances, times.floor_us, SLICES)
            found.spans_us.append((number, now_us - begin_us))
            number += 1

    found.end_us = run(map(sender, range(instances)), Path(_RATE_GB_S, capacity_bytes))
    return found
