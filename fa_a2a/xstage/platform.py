"""Platform profiles: the measured numbers the model needs, as JSON.

A profile is valid for one device and one number of ranks. It is checked when it is made, so every profile that
exists is usable; anything else raises ProfileError (a ValueError) that quotes the rule, what was got, and the way out.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ProfileError

StoreName = Literal["st", "bulk"]
"""How output tiles are stored: "st" 16-byte st.global, "bulk" cp.async.bulk waited for with .read."""


def refuse(rule: str, got: object, way_out: str = "correct the value or calibrate again") -> ProfileError:
    """A ProfileError in the house form: rule, what was got, way out."""
    return ProfileError(f"profile: {rule}; got {got!r}; {way_out}")


_LEAST, _MOST, _MOST_COUNTED = 1e-9, 1e18, 10**6  # no machine's numbers are outside; the model's arithmetic ends there


def _number(name: str, value: object, *, zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(f"{name} must be a number", value)
    if not 0 <= value <= sys.float_info.max or (value == 0 and not zero):  # also refuses NaN
        raise refuse(f"{name} must be finite and {'at least 0' if zero else 'positive'}", value)
    if value and not _LEAST <= value <= _MOST:
        raise refuse(f"{name} must be from {_LEAST:g} to {_MOST:g}", value)


def _count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_COUNTED:
        raise refuse(f"{name} must be a whole number of at least 1, at most {_MOST_COUNTED}", value)


def _range(name: str, value: object, inside: float) -> tuple[float, float]:
    """A checked confidence range, which JSON gives as a list."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise refuse(f"{name} must be two numbers, low and high", value)
    low, high = value
    _number(name, low)
    _number(name, high)
    if not low <= inside <= high:
        raise refuse(f"{name} must hold the value {inside!r}", value)
    return (low, high)


@dataclass(frozen=True)
class Capacity:
    """Bytes the path holds before a store waits (Q). `high_bytes` None: no knee was found, at least `low_bytes`."""

    low_bytes: float
    high_bytes: float | None

    def __post_init__(self) -> None:
        _number("capacity.low_bytes", self.low_bytes)
        if self.high_bytes is not None:
            _number("capacity.high_bytes", self.high_bytes)
            if self.high_bytes < self.low_bytes:
                raise refuse("capacity.high_bytes must not be below low_bytes", self, "swap the two")

    @property
    def middle_bytes(self) -> float:
        """Middle of the range, for point predictions; `low_bytes` where only "at least" is known."""
        return self.low_bytes if self.high_bytes is None else (self.low_bytes + self.high_bytes) / 2

    def __str__(self) -> str:
        low = f"{self.low_bytes / 1024**2:.2f}"
        if self.high_bytes is None:
            return f"at least {low} MiB"
        return f"{low} MiB" if self.high_bytes == self.low_bytes else f"{low} to {self.high_bytes / 1024**2:.2f} MiB"


@dataclass(frozen=True)
class StoreKind:
    """One way to store. `issue_us`: issue time without backpressure (T0) of one attention tile per SM.

    None means not measured, and the model then counts nothing: `drift_us`, extra time of each full wave after the
    first, when they are no longer in step; `blocked_load_us`, wait of the first load queued behind a blocked store.
    """

    issue_us: float
    capacity: Capacity
    drift_us: float | None
    blocked_load_us: float | None
    issue_range_us: tuple[float, float] | None = None
    """95 % range of issue_us."""

    def __post_init__(self) -> None:
        _number("issue_us", self.issue_us)
        if self.issue_range_us is not None:
            found = _range("issue_range_us", self.issue_range_us, self.issue_us)
            object.__setattr__(self, "issue_range_us", found)
        for name in ("drift_us", "blocked_load_us"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), zero=True)


@dataclass(frozen=True)
class AttentionSpeed:
    """How long an SM works on a (tile_rows, head_dim) tile for each key tile: exactly one of the two is given.

    `tflops` is the rate of all SMs together while every one is busy (4 * rows * keys * head_dim flops a tile), at
    head_dim 128; those of other head_dims are in speeds.py.
    `sigma_us_per_key_tile` is measured for 128 rows, 128 keys, head_dim 128 and scaled by flops to other tiles.
    """

    tflops: float | None = None
    sigma_us_per_key_tile: float | None = None

    def __post_init__(self) -> None:
        if (self.tflops is None) == (self.sigma_us_per_key_tile is None):
            raise refuse("attention must give exactly one of tflops, sigma_us_per_key_tile", self, "keep one of them")
        for name in ("tflops", "sigma_us_per_key_tile"):
            if getattr(self, name) is not None:
                _number(f"attention.{name}", getattr(self, name))

    def __str__(self) -> str:
        if self.sigma_us_per_key_tile is not None:
            return f"{self.sigma_us_per_key_tile:g} us for 128 rows and 128 keys of head_dim 128"
        return f"{self.tflops:.1f} TFLOP/s"

    def key_tile_us(self, *, tile_rows: int, key_tile: int, head_dim: int, num_sms: int) -> float:
        """Time in us that one SM needs for one (tile_rows, key_tile, head_dim) step."""
        if self.sigma_us_per_key_tile is not None:
            return self.sigma_us_per_key_tile * (tile_rows * key_tile * head_dim) / 128**3
        assert self.tflops is not None
        return 4 * tile_rows * key_tile * head_dim * num_sms / (self.tflops * 1e6)


@dataclass(frozen=True)
class PlatformProfile:
    """One device type and number of ranks. `rate_gb_s`: aggregate drain rate (R) of one sender, all ranks sending.

    `publish_us`: signalling completion in a kernel of its own after attention and waiting for the peers' signals;
    `publish_inside_us`: the same by attention's last block. None if not measured.
    """

    name: str
    device: str
    num_ranks: int
    num_sms: int
    rate_gb_s: float
    stores: Mapping[StoreName, StoreKind]
    attention: AttentionSpeed
    publish_us: float | None
    source: str
    date: str
    rate_range_gb_s: tuple[float, float] | None = None
    """95 % range of rate_gb_s."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of the software it was measured with."""
    publish_inside_us: float | None = None

    def __post_init__(self) -> None:
        for name in ("name", "device", "source", "date"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise refuse(f"{name} must be a non-empty string", getattr(self, name))
        _count("num_ranks", self.num_ranks)
        _count("num_sms", self.num_sms)
        _number("rate_gb_s", self.rate_gb_s)
        if self.rate_range_gb_s is not None:
            found = _range("rate_range_gb_s", self.rate_range_gb_s, self.rate_gb_s)
            object.__setattr__(self, "rate_range_gb_s", found)
        strings = isinstance(self.versions, Mapping) and all(
            isinstance(text, str) for pair in self.versions.items() for text in pair
        )
        if not strings:
            raise refuse("versions must be names and texts", self.versions)
        object.__setattr__(self, "versions", dict(self.versions))
        for name in ("publish_us", "publish_inside_us"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), zero=True)
        if not self.stores or set(self.stores) - set(get_args(StoreName)):
            raise refuse(f"stores must name one or more of {get_args(StoreName)}", sorted(self.stores))
        object.__setattr__(self, "stores", dict(self.stores))  # the caller's mapping may change

    def store(self, kind: StoreName) -> StoreKind:
        """The numbers of one store kind; ProfileError if the profile does not have it."""
        if kind not in self.stores:
            raise refuse(f"{self.name} must have store kind {kind!r}", sorted(self.stores), "name one it has")
        return self.stores[kind]

    def check_fits(self, *, num_ranks: int, device: str | None = None) -> None:
        """ProfileError unless the profile was made for this number of ranks and (if given) this device name."""
        if device is not None and device.strip().casefold() != self.device.strip().casefold():
            raise refuse(f"{self.name} is for {self.device!r}", device, "calibrate this device, or load its profile")
        if num_ranks != self.num_ranks:
            way_out = "calibrate with this many ranks, or load such a profile"
            raise refuse(f"{self.name} is for {self.num_ranks} ranks", num_ranks, way_out)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the form that profile_from_dict reads."""
        attention = {k: v for k, v in dataclasses.asdict(self.attention).items() if v is not None}
        stores = {kind: dataclasses.asdict(store) for kind, store in self.stores.items()}
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names} | {"stores": stores, "attention": attention}
