"""The Burst-Gap model: what a burst of remote stores costs the sender.

A burst of `volume_bytes` (all SMs together) is followed by `gap_us` of useful work without remote stores.
The platform is three numbers: the issue time without backpressure `floor_us`, the drain rate `rate_gb_s`
and the bytes the path holds before a store waits, `capacity_bytes`. It is a fluid, steady-state model.

Source: section 3 (characterization) and 4.1 (design test) of arXiv:2607.23264.
Times are in us, volumes in bytes, rates in GB/s with GB = 1e9 bytes. All functions raise
ConfigurationError (a ValueError) for a negative or non-finite argument and for a rate that is not positive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigurationError

_BYTES_PER_US_PER_GB_S = 1e3  # 1 GB/s = 1e9 bytes per 1e6 us


def _check(**values: float) -> None:
    for name, value in values.items():
        positive = name == "rate_gb_s"
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            rule = "positive" if positive else "at least 0"
            message = f"{name} must be finite and {rule}, got {value!r}; pass it in the unit its name says"
            raise ConfigurationError(message)


def drain_us(*, volume_bytes: float, rate_gb_s: float) -> float:
    """Time in us the path needs to drain `volume_bytes`: V/R."""
    _check(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s)
    return volume_bytes / (rate_gb_s * _BYTES_PER_US_PER_GB_S)


def issue_us(*, volume_bytes: float, rate_gb_s: float, floor_us: float, gap_us: float) -> float:
    """Sender-visible issue time in us of periodic bursts: max(T0, V/R - G), the Burst-Gap relation."""
    _check(floor_us=floor_us, gap_us=gap_us)
    return max(floor_us, drain_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s) - gap_us)


def backpressure_us(*, volume_bytes: float, rate_gb_s: float, floor_us: float, gap_us: float) -> float:
    """Issue time above the floor in us: [V/R - G - T0]+."""
    return issue_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s, floor_us=floor_us, gap_us=gap_us) - floor_us


def recovery_gap_us(*, volume_bytes: float, rate_gb_s: float, floor_us: float) -> float:
    """Smallest gap in us at which periodic bursts issue at the floor: G* = [V/R - T0]+."""
    _check(floor_us=floor_us)
    return max(0.0, drain_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s) - floor_us)


def period_us(*, volume_bytes: float, rate_gb_s: float, floor_us: float, gap_us: float) -> float:
    """Start-to-start period in us of periodic bursts: max(T0 + G, V/R), the max law."""
    _check(floor_us=floor_us, gap_us=gap_us)
    return max(floor_us + gap_us, drain_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s))


def completion_coupled_period_us(*, volume_bytes: float, rate_gb_s: float, gap_us: float) -> float:
    """Period in us if the sender waited for remote completion after each burst: G + V/R, the counterfactual sum."""
    _check(gap_us=gap_us)
    return gap_us + drain_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s)


def peak_outstanding_bytes(*, volume_bytes: float, rate_gb_s: float, floor_us: float) -> float:
    """Bytes in flight at the end of an unhindered burst: [V - R*T0]+."""
    _check(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s, floor_us=floor_us)
    return max(0.0, volume_bytes - rate_gb_s * _BYTES_PER_US_PER_GB_S * floor_us)


def isolated_issue_us(*, volume_bytes: float, rate_gb_s: float, floor_us: float, capacity_bytes: float) -> float:
    """Issue time in us of one burst into an empty path: max(T0, (V - Q)/R)."""
    _check(volume_bytes=volume_bytes, floor_us=floor_us, capacity_bytes=capacity_bytes)
    return max(floor_us, drain_us(volume_bytes=max(0.0, volume_bytes - capacity_bytes), rate_gb_s=rate_gb_s))


@dataclass(frozen=True)
class DesignBounds:
    """The two bounds under which the model predicts no backpressure, with their margins (negative: broken)."""

    rate_margin_gb_s: float
    """R - V/(T0 + G): sustained injection stays below the drain rate."""
    capacity_margin_bytes: float
    """Q - [V - R*T0]+: one burst fits into the path."""

    @property
    def rate_holds(self) -> bool:
        return self.rate_margin_gb_s >= 0

    @property
    def capacity_holds(self) -> bool:
        return self.capacity_margin_bytes >= 0

    @property
    def hold(self) -> bool:
        """Both hold: stores may ride on the existing computation; otherwise reshape the injection."""
        return self.rate_holds and self.capacity_holds


def design_bounds(
    *, volume_bytes: float, rate_gb_s: float, floor_us: float, gap_us: float, capacity_bytes: float
) -> DesignBounds:
    """The design test: V/(T0 + G) <= R (rate) and [V - R*T0]+ <= Q (capacity).

    With floor_us = gap_us = 0 the injection rate of a non-empty burst is infinite and the rate bound is broken.
    """
    _check(gap_us=gap_us, capacity_bytes=capacity_bytes)
    peak_bytes = peak_outstanding_bytes(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s, floor_us=floor_us)
    cycle_us = floor_us + gap_us
    if cycle_us > 0:
        injection_gb_s = volume_bytes / cycle_us / _BYTES_PER_US_PER_GB_S
    else:
        injection_gb_s = math.inf if volume_bytes > 0 else 0.0
    return DesignBounds(rate_margin_gb_s=rate_gb_s - injection_gb_s, capacity_margin_bytes=capacity_bytes - peak_bytes)


def stall_us(*, span_us: float, cover_us: float) -> float:
    """What of a sender-visible store span reaches the compute pipeline, in us: [span - cover]+.

    `cover_us` is the main loop that local staging lets run meanwhile (the tile's successor).
    """
    _check(span_us=span_us, cover_us=cover_us)
    return max(0.0, span_us - cover_us)
