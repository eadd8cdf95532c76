"""From the samples of a calibration to the machine's numbers: R, T0 and Q, each with a range, and how well the
model's laws hold there. Pure Python.

R    zero-gap periods of all SMs, all ranks sending, over the volumes and both kinds of store: least squares through 0
T0   mean issue time of all bursts of all blocks, where the gap is past recovery
Q    V - R*T of the slowest block of isolated bursts. Each is a lower bound, and equal to Q once the burst has stalled:
     low is the smallest of the stalled bursts, high the largest of all, each at the end of R's and T's ranges; without
     a stall Q is "at least" the largest
Periods come from totals of whole launches, timed from outside: service is uneven, and medians over blocks flatter the
path. So the max law is checked against a clock that T0 does not come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from . import burst_gap as bg
from .curves import Estimate, Isolated, Period, estimate, isolated, periods, remote_minus_local, slowest
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
    coupled_law: tuple[LawPoint, ...]
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
        self, *, name: str, attention: AttentionSpeed, publish_us: float | None, source: str
    ) -> PlatformProfile:
        """What the model needs of it. `attention` and `publish_us` are not in the samples and are taken over."""
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
    floor = estimate([value for p in recovered for value in p.sample.issue_us])
    if floor.low <= 0:
        raise bad("issue times must be positive", f"{floor} us at gaps past recovery", "record the sweep again")
    law = tuple(
        LawPoint(
            p.gap_us,
            p.median_us,
            bg.period_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s, floor_us=floor.value, gap_us=p.gap_us),
        )
        for p in sweep
    )
    coupled = tuple(
        LawPoint(
            p.gap_us,
            p.median_us,
            bg.completion_coupled_period_us(volume_bytes=p.sample.volume_bytes, rate_gb_s=rate_gb_s, gap_us=p.gap_us),
        )
        for p in _sweep(run, store, "fence")
    )
    bursts = isolated(run, store)
    return StoreFit(
        store=store,
        rate_gb_s=own_rate,
        issue_us=floor,
        isolated=tuple(bursts),
        capacity=capacity(bursts, rate),
        max_law=law,
        coupled_law=coupled,
        drift_us=_drift(run, store),
        blocked_load_us=_blocked_load(run, store),
        paced_us=_paced(run, store),
    )


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
