"""From the samples of a calibration to the machine's numbers: R, T0 and Q, each with a range, and how well the
model's laws hold there. Pure Python.

R    zero-gap periods of all SMs, all ranks sending, over the volumes and both kinds of store: least squares through 0
T0   mean issue time of all blocks where the gap is past recovery, without a launch's first bursts: all blocks start
     those at once, into each other's way, whatever the gap
Q    V - R*T of the slowest block of isolated bursts. Each is a lower bound, and equal to Q once the burst has stalled:
     low is the smallest of the stalled bursts, high the largest of all, each at the end of R's and T's ranges; without
     a stall Q is "at least" the largest
Periods come from totals of whole launches, timed from outside: service is uneven, and medians over blocks flatter the
path. So the max law is checked against a clock that T0 does not come from.

The figures below are of 2x H200, 132 blocks of 32 KiB, V/R = 11.8 us, st (bulk is alike).

max(T0 + G, V/R) is checked twice. Whole launches exceed it below the knee, by 10 % at worst, with 40 bursts as with
160 (13.2 and 13.1 us at gap 8.5). That is the end of the launch: each block has as many bursts, the path serves blocks
unevenly, and when the well served have left, the others, held to T0 + G each, cannot fill it. For the mean block's
gap and issue time are 11.3 us together there, less than V/R; and as no block does a burst in less than T0 + G = 9.1 us,
also after the first has left, all together had a period of at most 9.1^2 / (2 * 9.1 - 11.3) = 12.0 us until then, 2 %
above V/R. So the period while all run is recorded too (`steady_law`). The whole launch's stays: a kernel with a fixed
share of work for each block pays it.

G + V/R, a fence behind each burst, is a law of waves: a fence waits for V only if all blocks store at once, so the
bursts are released together. The period is the gap and the slowest block's issue time and fence, mean of all bursts:
the barrier's own time is no part of the law. Blocks that run on their own (`free_law`) start together and drift
apart, and each fence then waits for its own block's bytes and few others. Mean issue time + what else the period
leaves beside the gap, the fence, in bursts 1 to 40 of a launch and in bursts 41 to 160: 3.8 + 8.4 and 3.6 + 8.5 us at
gap 0.6; 3.2 + 7.9 and 2.4 + 7.7 at gap 8.6; 2.1 + 6.5 and 1.5 + 4.9 at gap 20.6. In step neither could depend on the
gap or on the burst: each would find the path empty, and take the 5.3 us to issue that isolated bursts take on average.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import get_args

from . import burst_gap as bg
from .curves import (
    Completed,
    Estimate,
    Isolated,
    Period,
    completed,
    estimate,
    isolated,
    periods,
    remote_minus_local,
    slowest,
)
from .platform import AttentionSpeed, Capacity, PlatformProfile, StoreKind, StoreName
from .samples import Run, bad

RECOVERED = 1.3  # times V/R: gaps from there on are past recovery, whatever T0
STALLED = 0.25  # of V/R above the local control: such a burst has waited for the path
TILE_BYTES = 32 * 1024  # of a block's burst, unless the samples have one size of gap sweep only


@dataclass(frozen=True)
class LawPoint:
    """A period beside what a law says of it."""

    gap_us: float
    measured_us: float
    predicted_us: float

    @property
    def residual(self) -> float:
        """Relative: positive where the machine is slower than the law."""
        return self.measured_us / self.predicted_us - 1


@dataclass(frozen=True)
class StoreFit:
    """One kind of store."""

    store: StoreName
    rate_gb_s: Estimate
    issue_us: Estimate
    isolated: tuple[Isolated, ...]
    capacity: Capacity
    max_law: tuple[LawPoint, ...]
    """Of whole launches."""
    steady_law: tuple[LawPoint, ...]
    """The max law, of the time while all blocks run; empty for older samples."""
    completed: tuple[Completed, ...]
    coupled_law: tuple[LawPoint, ...]
    """Of bursts released together; empty for older samples."""
    free_law: tuple[LawPoint, ...]
    """The same of blocks that run on their own, and break it."""
    drift_us: float | None
    blocked_load_us: float | None
    paced_us: dict[tuple[int, float], float] = field(default_factory=dict)
    """(slices, pause in us) -> issue time of the slowest block above the local control's."""


@dataclass(frozen=True)
class Calibration:
    """What `fit` found in a run."""

    run: Run
    rate_gb_s: Estimate
    one_sender_gb_s: Estimate | None
    stores: dict[StoreName, StoreFit]

    def profile(
        self,
        *,
        name: str,
        attention: AttentionSpeed,
        publish_us: float | None,
        source: str,
        publish_inside_us: float | None = None,
    ) -> PlatformProfile:
        """What the model needs of it. `attention` and the times of publication are not in the samples and are taken
        over."""
        return PlatformProfile(
            name=name,
            device=self.run.device,
            num_ranks=self.run.num_ranks,
            num_sms=self.run.num_sms,
            rate_gb_s=round(self.rate_gb_s.value, 1),
            rate_range_gb_s=_range(self.rate_gb_s, 1),
            stores={store: _kind(found) for store, found in self.stores.items()},
            attention=attention,
            publish_us=publish_us,
            publish_inside_us=publish_inside_us,
            source=source,
            date=self.run.date[:10],
            versions=self.run.versions,
        )


def fit(run: Run) -> Calibration:
    """The machine's numbers. ProfileError where the samples do not suffice."""
    stores = [store for store in get_args(StoreName) if run.select("zero_gap", store=store)]
    if not stores:
        raise bad(
            "there must be zero-gap samples", [s.experiment for s in run.samples][:9], "run the whole calibration"
        )
    rates = {store: _rates(run, store, "all_to_all") for store in stores}
    if not all(rates.values()):
        rule = f"there must be zero-gap samples of all {run.num_sms} SMs with all ranks sending"
        raise bad(rule, [store for store in stores if not rates[store]], "run the whole calibration")
    rate = estimate([value for store in stores for value in rates[store]])
    one = [value for store in stores for value in _rates(run, store, "one_sender")]
    fits = {store: _store(run, store, estimate(rates[store]), rate) for store in stores}
    return Calibration(run, rate, estimate(one) if one else None, fits)


def _rates(run: Run, store: StoreName, traffic: str) -> list[float]:
    """One rate a round."""
    points = periods(run.select("zero_gap", store=store, traffic=traffic, num_ctas=run.num_sms))
    rounds = min((len(point.period_us) for point in points), default=0)
    squares = sum(point.sample.volume_bytes**2 for point in points)
    return [squares / sum(p.sample.volume_bytes * p.period_us[i] for p in points) / 1e3 for i in range(rounds)]


def _store(run: Run, store: StoreName, own_rate: Estimate, rate: Estimate) -> StoreFit:
    sweep = _sweep(run, store, "gap")
    if not sweep:
        raise bad("there must be a gap sweep with all ranks sending", store, "run the whole calibration")
    volume_bytes, rate_gb_s = sweep[0].sample.volume_bytes, rate.value
    drain_us = bg.drain_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s)
    recovered = [p for p in sweep if p.gap_us >= RECOVERED * drain_us]
    if not recovered:
        rule = f"the gap sweep must go past recovery, to {RECOVERED * drain_us:.1f} us or more"
        raise bad(rule, f"{max(p.gap_us for p in sweep):.1f} us", "add longer gaps")
    floor = estimate([value for p in recovered for value in p.block_issue_us])
    if floor.low <= 0:
        raise bad("issue times must be positive", f"{floor} us at gaps past recovery", "record the sweep again")

    def largest(gap_us: float) -> float:
        return bg.period_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s, floor_us=floor.value, gap_us=gap_us)

    def coupled(gap_us: float) -> float:
        return bg.completion_coupled_period_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s, gap_us=gap_us)

    steady = [(p.gap_us, statistics.median(p.sample.steady_us)) for p in sweep if p.sample.steady_us]
    waves = completed(run, store, sweep[0].sample.bytes_per_cta)
    free = [p for p in _sweep(run, store, "fence") if p.sample.volume_bytes == volume_bytes]
    bursts = isolated(run, store)
    return StoreFit(
        store=store,
        rate_gb_s=own_rate,
        issue_us=floor,
        isolated=tuple(bursts),
        capacity=capacity(bursts, rate),
        max_law=_law([(p.gap_us, p.median_us) for p in sweep], largest),
        steady_law=_law(steady, largest),
        completed=tuple(waves),
        coupled_law=_law([(p.gap_us, p.gap_us + p.done_us) for p in waves], coupled),
        free_law=_law([(p.gap_us, p.median_us) for p in free], coupled),
        drift_us=_drift(run, store),
        blocked_load_us=_blocked_load(run, store),
        paced_us=_paced(run, store),
    )


def _law(points: Iterable[tuple[float, float]], predict: Callable[[float], float]) -> tuple[LawPoint, ...]:
    """From (gap, measured period) each."""
    return tuple(LawPoint(gap_us, measured_us, predict(gap_us)) for gap_us, measured_us in points)


def _sweep(run: Run, store: StoreName, experiment: str) -> list[Period]:
    """The sweep over gaps, of one volume: an attention tile's, or the only one there is."""
    points = periods(run.select(experiment, store=store, traffic="all_to_all", num_ctas=run.num_sms))
    sizes = {point.sample.bytes_per_cta for point in points}
    size = TILE_BYTES if TILE_BYTES in sizes else min(sizes, default=0)
    return [point for point in points if point.sample.bytes_per_cta == size]


def capacity(points: list[Isolated], rate: Estimate) -> Capacity:
    """Q from isolated bursts; see above. ProfileError without any."""
    if not points:
        raise bad("there must be isolated bursts with all ranks sending", "none", "run the whole calibration")
    stalled, least, most = [], [], []
    for point in points:
        drain_us = bg.drain_us(volume_bytes=point.volume_bytes, rate_gb_s=rate.value)
        least.append(point.volume_bytes - rate.high * 1e3 * point.issue_us.high)
        most.append(point.volume_bytes - rate.low * 1e3 * point.issue_us.low)
        if point.issue_us.value > point.local_us + STALLED * drain_us:
            stalled.append(least[-1])
    # a path slower than R for one burst would hold less than nothing: a byte stands for "no capacity seen"
    if not stalled:
        return Capacity(round(max(1.0, *least)), None)
    return Capacity(round(max(1.0, min(stalled))), round(max(1.0, *most)))


def _drift(run: Run, store: StoreName) -> float | None:
    """Extra of each full wave after the first: launches of several waves against launches of one."""
    points = {s.bursts for s in run.select("waves", store=store)}
    if not points:
        return None
    if len(points) < 2:
        raise bad("waves need launches of one burst and of several", sorted(points), "calibrate again")
    one, many = (remote_minus_local(run, slowest, "waves", store=store, bursts=n) for n in (min(points), max(points)))
    return max(0.0, (many - one) / (max(points) - min(points)))


def _blocked_load(run: Run, store: StoreName) -> float | None:
    if not run.select("load", store=store, slices=1):
        return None
    wait = remote_minus_local(run, lambda s: slowest(s, "behind_slowest_us"), "load", store=store, slices=1)
    return max(0.0, wait)


def _paced(run: Run, store: StoreName) -> dict[tuple[int, float], float]:
    settings = sorted({(s.slices, s.pace_us) for s in run.select("paced", store=store)})
    return {
        (slices, pace): remote_minus_local(run, slowest, "paced", store=store, slices=slices, pace_us=pace)
        for slices, pace in settings
    }


def _range(found: Estimate, digits: int) -> tuple[float, float]:
    """Rounded like the value, which it then still holds."""
    return (round(found.low, digits), round(found.high, digits))


def _kind(found: StoreFit) -> StoreKind:
    rounded = [None if v is None else round(v, 2) for v in (found.drift_us, found.blocked_load_us)]
    return StoreKind(
        issue_us=round(found.issue_us.value, 3),
        issue_range_us=_range(found.issue_us, 3),
        capacity=found.capacity,
        drift_us=rounded[0],
        blocked_load_us=rounded[1],
    )
