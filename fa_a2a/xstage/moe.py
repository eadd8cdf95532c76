"""MegaMoE's two schedules of tiles, and what each leaves between bursts of remote stores.

One expert-parallel layer is two streams of tiles. Linear-1 computes and stores locally; a Linear-2 tile ends in a
burst of remote stores and needs the Linear-1 tiles of its row. A stream has scheduler rows (row blocks of tokens,
expert by expert) of several pairs of column tiles; an instance is a pair of CTAs that takes every G-th pair of each
stream, its two roles a column tile each. The wave schedule takes a wave of rows through Linear-1, then through
Linear-2, so that bursts follow one another after one short main loop. The interleaved schedule merges the streams and
keeps Linear-1 at least `lead` rows ahead.

Source: sections 4.2 and 5.2.3 of arXiv:2607.23264 (Algorithm 1, equations 11 to 16, Table 2). Times are in us.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigurationError
from . import burst_gap as bg

Layer = Literal["L1", "L2"]


@dataclass(frozen=True)
class Tile:
    """A column tile `n` of row block `m` of an expert; `row` is the same block's place in the stream."""

    layer: Layer
    expert: int
    row: int
    m: int
    n: int


@dataclass(frozen=True)
class Streams:
    """Both streams of one rank. expert_rows: row blocks of each expert, in order; l1_pairs, l2_pairs: pairs of column
    tiles in a row of each stream (P1 and P2)."""

    expert_rows: tuple[int, ...]
    l1_pairs: int
    l2_pairs: int

    def __post_init__(self) -> None:
        if min(self.l1_pairs, self.l2_pairs) < 1 or min(self.expert_rows, default=0) < 0 or not self.rows:
            raise ConfigurationError(f"a stream has rows, and each row pairs of tiles, at least 1; got {self}")

    @property
    def rows(self) -> int:
        return sum(self.expert_rows)

    def place(self, row: int) -> tuple[int, int]:
        """(expert, row block of it) of a row of the stream."""
        block = row
        for expert, count in enumerate(self.expert_rows):
            if block < count:
                return expert, block
            block -= count
        raise ConfigurationError(f"the stream has {self.rows} rows, got row {row} beyond them")

    def tile(self, layer: Layer, number: int, role: int) -> Tile:
        """Of the pair of that number in the stream, the role's tile."""
        row, pair = divmod(number, self.l1_pairs if layer == "L1" else self.l2_pairs)
        expert, block = self.place(row)
        return Tile(layer, expert, row, block, 2 * pair + role)


def _check(instance: int, role: int, instances: int) -> None:
    if not (0 <= instance < instances and role in (0, 1)):
        got = f"instance {instance} of {instances}, role {role}"
        raise ConfigurationError(f"an instance lies below their number, its role is 0 or 1; got {got}")


def interleaved(streams: Streams, *, instance: int, role: int, instances: int, lead: int) -> Iterator[Tile]:
    """Algorithm 1: Linear-2 as soon as Linear-1 is `lead` rows ahead in this instance's own walk, else Linear-1.

    With a lead of 0 two instances could each wait for a Linear-1 tile that the other has behind its Linear-2 one."""
    _check(instance, role, instances)
    if lead < 1:
        raise ConfigurationError(f"lead is a number of rows, at least 1, or instances wait for each other; got {lead}")
    first, second = instance, instance
    first_end, second_end = streams.rows * streams.l1_pairs, streams.rows * streams.l2_pairs
    while first < first_end or second < second_end:
        ahead = first // streams.l1_pairs if first < first_end else math.inf
        if second < second_end and second // streams.l2_pairs + lead <= ahead:
            yield streams.tile("L2", second, role)
            second += instances
        else:
            yield streams.tile("L1", first, role)
            first += instances


def waves(streams: Streams, *, instance: int, role: int, instances: int, wave_rows: int) -> Iterator[Tile]:
    """The expert-wave schedule: `wave_rows` rows of Linear-1, then the same rows of Linear-2, then the next wave."""
    _check(instance, role, instances)
    if wave_rows < 1:
        raise ConfigurationError(f"wave_rows must be at least 1, got {wave_rows}")
    first, second = instance, instance
    for begin in range(0, streams.rows, wave_rows):
        end = min(begin + wave_rows, streams.rows)
        for number in range(first, end * streams.l1_pairs, instances):
            yield streams.tile("L1", number, role)
            first = number + instances
        for number in range(second, end * streams.l2_pairs, instances):
            yield streams.tile("L2", number, role)
            second = number + instances


def knee_lead(*, tile_columns: int, num_sms: int, inter_features: int) -> int:
    """D_knee = ceil(b_n * K / (2 * h_inter)): rows of Linear-1 that the instances have in work at the same time, so
    that a Linear-2 tile which is `lead` rows behind finds its row complete. It depends on no rate. Approximate: in
    simulation of Table 2's rows the layer is within 2 % of its best time from 3 rows below to 1 above it."""
    if min(tile_columns, num_sms, inter_features) < 1:
        got = f"tile_columns={tile_columns}, num_sms={num_sms}, inter_features={inter_features}"
        raise ConfigurationError(f"columns, SMs and features must be at least 1, got {got}")
    return -(-tile_columns * num_sms // (2 * inter_features))


@dataclass(frozen=True)
class MoeTimes:
    """One configuration's main loops and bursts: `drain_us` is V/R of a burst of all SMs, `floor_us` the span of a
    Linear-2 tile's stores without backpressure, staging included; n1 / n2 = `tile_ratio` Linear-1 tiles come to one
    of Linear-2 in the long run."""

    l1_us: float
    l2_us: float
    drain_us: float
    floor_us: float
    tile_ratio: float

    def gap_us(self, schedule: Literal["waves", "interleaved"]) -> float:
        """Useful time between two bursts: one Linear-2 main loop, and in the interleaved schedule the share of
        Linear-1 that comes with it."""
        return self.l2_us + (self.tile_ratio * self.l1_us if schedule == "interleaved" else 0.0)

    def span_us(self, schedule: Literal["waves", "interleaved"]) -> float:
        """Sender-visible time of a tile's stores: max(floor, V/R - gap)."""
        return bg.issue_us(
            volume_bytes=self.drain_us * 1e3, rate_gb_s=1.0, floor_us=self.floor_us, gap_us=self.gap_us(schedule)
        )

    def stall_us(self, schedule: Literal["waves", "interleaved"]) -> float:
        """What of the span reaches the tensor cores: [span - cover]+. The cover is the next tile's main loop, which
        double-buffered staging lets run meanwhile: Linear-2's in a wave, Linear-1's where one was put in between."""
        return bg.stall_us(
            span_us=self.span_us(schedule), cover_us=self.l1_us if schedule == "interleaved" else self.l2_us
        )

    @property
    def recovers(self) -> bool:
        """Whether interleaving existing work suffices: gap >= [V/R - floor]+. Does not depend on the lead."""
        return self.gap_us("interleaved") >= max(0.0, self.drain_us - self.floor_us)


def from_spans(
    *, wave_span_us: float, floor_us: float, l1_us: float, l2_us: float, tile_ratio: float | None = None
) -> MoeTimes:
    """Times of a measured configuration (a row of Table 2). A wave's bursts are bound by the drain, span = V/R - T_L2,
    so V/R = span + T_L2 where the span is above the floor.

    tile_ratio None: assumed from the main loops. Linear-1 has 2 h_inter columns over the hidden features, Linear-2 as
    many columns as hidden features over h_inter: n1 / n2 = 2 h_inter / hidden, and if a main loop takes time in
    proportion to what it sums over, T_L1 / T_L2 = hidden / h_inter; so n1 / n2 = 2 T_L2 / T_L1.
    """
    ratio = 2 * l2_us / l1_us if tile_ratio is None else tile_ratio
    return MoeTimes(l1_us, l2_us, wave_span_us + l2_us, floor_us, ratio)
