"""Recorded samples of the microbenchmark: JSON lines of kind "calibrate", checked before anything is fitted to them.

A line is one point: an experiment with its settings, and what was measured there, round by round. Times are in us.
Anything amiss raises ProfileError (a ValueError) that quotes the rule, what was got, and the way out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ..errors import ProfileError
from .platform import StoreName

KIND = "calibrate"
EXPERIMENTS = ("zero_gap", "gap", "fence", "fence_released", "isolated", "load", "paced", "waves")
TRAFFIC = ("all_to_all", "one_sender", "local")
RATES_GB_S = (5.0, 20000.0)
"""A zero-gap rate outside of this is no link's: the times are in another unit."""

_RUN_KEYS = ("kind", "device", "world_size", "num_sms", "date", "versions")
_OTHER_KEYS = ("git", "content_hash")
_COUNTS = ("num_ctas", "bytes_per_cta", "bursts", "slices")
_LISTS = ("total_us", "gap_measured_us", "issue_us")
_OPTIONAL_LISTS = ("slowest_us", "median_us", "behind_slowest_us", "behind_median_us", "done_us", "steady_us")


def bad(rule: str, got: object, way_out: str) -> ProfileError:
    return ProfileError(f"calibration samples: {rule}; got {got!r}; {way_out}")


@dataclass(frozen=True)
class Sample:
    """One point. The lists of a round each: `total_us` the whole launch on the slowest rank, `gap_measured_us` a
    burst's gap with the loop's own overhead (and the barrier's, where bursts are released), `issue_us` the mean of all
    blocks, `steady_us` the period while all blocks run on the slowest rank ("gap" and "fence"; older lines lack it).
    The lists of a burst and rank each (of released bursts only; "waves": of a launch and rank): slowest and median
    block's issue time, and its wait behind the burst; `done_us` the slowest block's issue time and wait together.

    "fence" is of blocks that run on their own, "fence_released" of blocks that start each burst together."""

    experiment: str
    store: StoreName
    traffic: str
    num_ctas: int
    bytes_per_cta: int
    bursts: int
    gap_us: float
    slices: int
    pace_us: float
    total_us: tuple[float, ...]
    gap_measured_us: tuple[float, ...]
    issue_us: tuple[float, ...]
    slowest_us: tuple[float, ...] = ()
    median_us: tuple[float, ...] = ()
    behind_slowest_us: tuple[float, ...] = ()
    behind_median_us: tuple[float, ...] = ()
    done_us: tuple[float, ...] = ()
    steady_us: tuple[float, ...] = ()

    @property
    def volume_bytes(self) -> int:
        return self.num_ctas * self.bytes_per_cta


_SAMPLE_KEYS = tuple(Sample.__dataclass_fields__)


@dataclass(frozen=True)
class Run:
    """All points of one calibration: one device type, one number of ranks, one date."""

    device: str
    num_ranks: int
    num_sms: int
    date: str
    versions: Mapping[str, str]
    samples: tuple[Sample, ...]

    def select(self, experiment: str, **equal: object) -> list[Sample]:
        """The experiment's points whose fields equal those given."""
        return [
            s
            for s in self.samples
            if s.experiment == experiment and all(getattr(s, name) == value for name, value in equal.items())
        ]


def read_runs(lines: Iterable[Mapping[str, Any]]) -> list[Run]:
    """The runs among the lines, oldest first; lines of other kinds are passed over.

    ProfileError if there are none, if a line is malformed, or if the lines are of several devices or world sizes.
    """
    chosen = [line for line in lines if line.get("kind") == KIND]
    if not chosen:
        raise bad(f"there must be lines of kind {KIND!r}", "none", "record some with fa-a2a calibrate on GPUs")
    for line in chosen:
        if missing := [key for key in _RUN_KEYS if key not in line]:
            raise bad(f"a line must hold {', '.join(_RUN_KEYS)}", sorted(line), f"add {', '.join(missing)}")
    for key in ("device", "world_size", "num_sms"):
        values = {str(line[key]) for line in chosen}
        if len(values) > 1:
            raise bad(f"all lines must have one {key}", sorted(values), "fit each in a file of its own")
    runs = []
    for date in sorted({str(line["date"]) for line in chosen}):
        mine = [line for line in chosen if str(line["date"]) == date]
        first = mine[0]
        for key in ("world_size", "num_sms"):
            _count(key, first[key])
        samples = tuple(_sample(line) for line in mine)
        versions = {str(name): str(text) for name, text in dict(first["versions"]).items()}
        runs.append(Run(str(first["device"]), first["world_size"], first["num_sms"], date, versions, samples))
    return runs


def _sample(line: Mapping[str, Any]) -> Sample:
    known = {*_RUN_KEYS, *_OTHER_KEYS, *_SAMPLE_KEYS}
    if unknown := sorted(set(line) - known):
        raise bad("a line may hold only the fields of a sample, times in us", unknown, "remove or convert these fields")
    fields = {key: line[key] for key in _SAMPLE_KEYS if key in line}
    if missing := [key for key in _SAMPLE_KEYS if key not in fields and key not in _OPTIONAL_LISTS]:
        raise bad("a line must hold every field of a sample", sorted(line), f"add {', '.join(missing)}")
    for key, allowed in (("experiment", EXPERIMENTS), ("store", get_args(StoreName)), ("traffic", TRAFFIC)):
        if fields[key] not in allowed:
            raise bad(f"{key} must be one of {', '.join(allowed)}", fields[key], "correct or remove the line")
    for key in _COUNTS:
        _count(key, fields[key])
    for key in ("gap_us", "pace_us"):
        _time(key, fields[key])
    for key in (*_LISTS, *_OPTIONAL_LISTS):
        values = fields.get(key, [])
        if not isinstance(values, (list, tuple)) or (key in _LISTS and not values):
            raise bad(f"{key} must be a list of times, one for each round", values, "record the point again")
        for value in values:
            _time(key, value, positive=key == "total_us")
        fields[key] = tuple(float(value) for value in values)
    sample = Sample(**fields)
    _plausible(sample)
    return sample


def _plausible(sample: Sample) -> None:
    of_rounds = (*_LISTS, "steady_us") if sample.steady_us else _LISTS
    if len({len(getattr(sample, key)) for key in of_rounds}) > 1:
        raise bad(f"{', '.join(of_rounds)} must have one entry a round", sample.experiment, "record the point again")
    if sample.experiment == "zero_gap" and sample.traffic != "local":
        rate = sample.volume_bytes * sample.bursts / max(sample.total_us) / 1e3
        if not RATES_GB_S[0] <= rate <= RATES_GB_S[1]:
            rule = f"a zero-gap launch must run at {RATES_GB_S[0]:g} to {RATES_GB_S[1]:g} GB/s"
            raise bad(rule, f"{rate:.4g} GB/s", "give total_us in us and bytes_per_cta in bytes")


def _count(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad(f"{key} must be a whole number of at least 1", value, "correct or remove the line")


def _time(key: str, value: object, positive: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):  # type: ignore[arg-type, operator]
        rule = "positive" if positive else "at least 0"
        raise bad(f"{key} must be finite and {rule}, in us", value, "record the point again")
