"""What measured times say about the exchange. All times in us, of one method each, from the same run."""

from __future__ import annotations

import math

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
