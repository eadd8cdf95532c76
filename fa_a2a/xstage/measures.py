"""What measured times say about the exchange. All times in us, of one method each, from the same run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..errors import ConfigurationError


def speedup(*, serial_us: float, fused_us: float) -> float:
    """Serial time over fused time."""
    if not (math.isfinite(serial_us) and math.isfinite(fused_us) and serial_us > 0 and fused_us > 0):
        got = f"serial_us={serial_us!r}, fused_us={fused_us!r}"
        raise ConfigurationError(f"times must be finite and positive, got {got}; pass measured times in us")
    return serial_us / fused_us


def hidden_fraction(*, serial_us: float, fused_us: float, attention_us: float) -> float:
    """Share of the exchange that fusion hides: (serial - fused)/(serial - attention); noise may lift it above 1.

    ConfigurationError if serial is not above attention alone: there is then nothing to hide.
    """
    if not all(map(math.isfinite, (serial_us, fused_us, attention_us))) or not serial_us > attention_us:
        got = f"serial_us={serial_us!r}, fused_us={fused_us!r}, attention_us={attention_us!r}"
        raise ConfigurationError(f"serial must be above attention alone, got {got}; measure them in one run")
    return (serial_us - fused_us) / (serial_us - attention_us)


def wait_for_slowest_us(calls_us: Sequence[Sequence[float]]) -> float:
    """What waiting in each call for the rank that is slowest in it adds to a call of the rank that is slowest on
    average. calls_us: each rank's calls in order. A rank that is slower throughout adds nothing: it is so alone, too.

    ConfigurationError unless there are as many calls of each rank, at least one.
    """
    if len({len(calls) for calls in calls_us}) != 1 or not calls_us[0]:
        got = f"{[len(calls) for calls in calls_us]}"
        raise ConfigurationError(f"there must be as many calls of each rank, at least one; got {got}; cut them alike")
    each_us: float = statistics.mean(max(call) for call in zip(*calls_us, strict=True))
    return each_us - max(statistics.mean(calls) for calls in calls_us)
