"""From samples to what the model speaks of: periods against the gap, isolated issue times against the volume."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .samples import Run, Sample, bad

_RESAMPLES = 400
_SEED = 20260723  # fixed: a fit of the same samples says the same


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % range."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


def estimate(values: Sequence[float]) -> Estimate:
    """Median, with the 2.5 and 97.5 % points of its bootstrap distribution."""
    middle = statistics.median(values)
    generator = random.Random(_SEED)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    cut = _RESAMPLES // 40
    return Estimate(middle, min(middle, medians[cut]), max(middle, medians[-1 - cut]))


@dataclass(frozen=True)
class Period:
    """Start-to-start time of periodic bursts, one value a round: from totals of two launches of the slowest rank."""

    sample: Sample
    gap_us: float
    """As measured: the pause, and the loop's own overhead."""
    period_us: tuple[float, ...]
    block_issue_us: tuple[float, ...]
    """Issue time of the same bursts by the blocks' own clocks, mean of all blocks."""

    @property
    def median_us(self) -> float:
        return statistics.median(self.period_us)

    @property
    def issue_us(self) -> float:
        """What the period leaves beside the gap."""
        return self.median_us - self.gap_us


def periods(samples: Iterable[Sample]) -> list[Period]:
    """One for each setting, by volume and gap. (total of many bursts - total of few) / (many - few) leaves out the
    launch, the first bursts into an empty path, and the last drain. ProfileError where a setting has one count only."""
    settings: dict[tuple[object, ...], list[Sample]] = defaultdict(list)
    for s in samples:
        settings[s.experiment, s.store, s.traffic, s.num_ctas, s.bytes_per_cta, s.gap_us].append(s)
    found = []
    for setting, points in settings.items():
        few, many = min(points, key=lambda s: s.bursts), max(points, key=lambda s: s.bursts)
        steps = many.bursts - few.bursts
        if not steps or len(few.total_us) != len(many.total_us):
            rule = "each periodic point needs two numbers of bursts with equally many rounds"
            raise bad(rule, f"{[(s.bursts, len(s.total_us)) for s in points]} at {setting}", "record the point again")
        values = tuple((b - a) / steps for a, b in zip(few.total_us, many.total_us, strict=True))
        if statistics.median(values) <= 0:
            raise bad("more bursts must take longer", f"{values} us a burst at {setting}", "record the point again")
        sums = ([s.bursts * value for value in s.issue_us] for s in (few, many))
        issue = tuple((b - a) / steps for a, b in zip(*sums, strict=True))
        found.append(Period(many, statistics.median(many.gap_measured_us), values, issue))
    return sorted(found, key=lambda p: (p.sample.volume_bytes, p.sample.num_ctas, p.gap_us))


@dataclass(frozen=True)
class Isolated:
    """Slowest block of isolated bursts of one volume, remote, and the median of the local control."""

    volume_bytes: int
    issue_us: Estimate
    local_us: float


def isolated(run: Run, store: str, traffic: str = "all_to_all") -> list[Isolated]:
    """By volume, with all SMs. ProfileError where a volume has no local control."""
    found = []
    for sample in run.select("isolated", store=store, traffic=traffic, num_ctas=run.num_sms):
        control = run.select("isolated", store=store, traffic="local", bytes_per_cta=sample.bytes_per_cta)
        control = [s for s in control if s.num_ctas == sample.num_ctas]
        remote_us = slowest(sample)
        if not control:
            what = f"{store}, {sample.bytes_per_cta} bytes a block"
            raise bad("each isolated burst needs its local control", what, "calibrate again, with traffic local too")
        local_us = statistics.median(slowest(control[0]))
        found.append(Isolated(sample.volume_bytes, estimate(remote_us), local_us))
    return sorted(found, key=lambda point: point.volume_bytes)


@dataclass(frozen=True)
class Completed:
    """Bursts that all blocks start together, each until its bytes have arrived. The wait for the common start, the
    barrier's own time, is in none of these numbers."""

    gap_us: float
    """As asked for."""
    done_us: float
    """From a block's start to the end of its fence: the slowest block's, mean of all bursts."""
    local_us: float
    """The same of the local control."""
    above_local_us: float
    """What a burst adds to the whole launch's time beyond the local control, whose barrier takes as long: checks the
    two before by a clock outside of the kernel, to a tick of the barrier's clock (1 us at most)."""


def completed(run: Run, store: str, bytes_per_cta: int) -> list[Completed]:
    """By gap, with all SMs. ProfileError where a gap has no local control."""
    found = []
    setting = {"store": store, "num_ctas": run.num_sms, "bytes_per_cta": bytes_per_cta}
    for sample in run.select("fence_released", traffic="all_to_all", **setting):
        same = {"bursts": sample.bursts, "gap_us": sample.gap_us}
        control = run.select("fence_released", traffic="local", **setting, **same)
        if not control:
            what = f"{store}, gap {sample.gap_us:g} us"
            raise bad("each released burst with a fence needs its local control", what, "calibrate again")
        done, local = (statistics.mean(slowest(s, "done_us")) for s in (sample, control[0]))
        remote_us, local_us = (statistics.median(s.total_us) for s in (sample, control[0]))
        found.append(Completed(sample.gap_us, done, local, (remote_us - local_us) / sample.bursts))
    return sorted(found, key=lambda point: point.gap_us)


def slowest(sample: Sample, field: str = "slowest_us") -> tuple[float, ...]:
    values: tuple[float, ...] = getattr(sample, field)
    if not values:
        what = f"{sample.experiment} {sample.store} {sample.traffic} without {field}"
        raise bad("released bursts need the slowest block's times", what, "record the point again")
    return values


def remote_minus_local(run: Run, pick: Callable[[Sample], Sequence[float]], experiment: str, **equal: object) -> float:
    """Difference of medians; ProfileError unless each of the two is there."""
    medians = []
    for traffic in ("all_to_all", "local"):
        points = run.select(experiment, traffic=traffic, **equal)
        if not points:
            raise bad(f"{experiment} needs traffic {traffic}", equal, "calibrate again")
        medians.append(statistics.median(pick(points[0])))
    return medians[0] - medians[1]
