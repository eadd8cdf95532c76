"""Do prediction and measurement meet? For one cost, and for the lines of a sweep.

They agree within 5 us, 25 % of the cost or 0.5 % of attention's time, whichever is largest. A measurement whose own
95 % interval is wider than that decides nothing, unless the two lie apart by more than tolerance and interval together;
a sharper one counts as it stands.

A line may hold the sender-visible cost at equal clocks, too. The model knows no clocks: a GPU at its power limit lowers
its own where more power is drawn, and changes it from round to round. Where times decide nothing, that figure
does; a cost that lies apart in time only is told as that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

TOLERANCE_US = 5.0
OF_COST = 0.25
OF_ATTENTION = 0.005

Verdict = Literal["agree", "undecided", "apart"]
Which = Literal["sender", "ready"]


def tolerance_us(*, measured_us: float, attention_us: float) -> float:
    """How far a predicted cost may lie from the measured one, in us."""
    return max(TOLERANCE_US, OF_COST * abs(measured_us), OF_ATTENTION * attention_us)


def verdict(*, predicted_us: float, measured_us: float, ci_us: float | None, attention_us: float) -> Verdict:
    """ci_us: half of the measured cost's 95 % interval; None (from one round) decides nothing."""
    if ci_us is None:
        return "undecided"
    apart_us, allowed_us = (
        abs(predicted_us - measured_us),
        tolerance_us(measured_us=measured_us, attention_us=attention_us),
    )
    if ci_us > allowed_us:
        return "apart" if apart_us > allowed_us + ci_us else "undecided"
    return "agree" if apart_us <= allowed_us else "apart"


@dataclass(frozen=True)
class Comparison:
    """One cost of one line, predicted and measured, in us."""

    world_size: int
    seq_len: int
    num_heads: int
    kernel: str
    which: Which
    predicted_us: float
    measured_us: float
    ci_us: float | None
    attention_us: float
    equal_clock_us: float | None = None
    equal_clock_ci_us: float | None = None

    @property
    def verdict(self) -> Verdict:
        in_time = self._verdict(self.measured_us, self.ci_us)
        return self._at_equal_clocks if in_time == "undecided" else in_time

    @property
    def by_clocks(self) -> bool:
        """Whether it takes equal clocks to agree."""
        return self._at_equal_clocks == "agree" and self._verdict(self.measured_us, self.ci_us) != "agree"

    @property
    def _at_equal_clocks(self) -> Verdict:
        if self.equal_clock_us is None:
            return "undecided"
        return self._verdict(self.equal_clock_us, self.equal_clock_ci_us)

    def _verdict(self, measured_us: float, ci_us: float | None) -> Verdict:
        return verdict(
            predicted_us=self.predicted_us, measured_us=measured_us, ci_us=ci_us, attention_us=self.attention_us
        )

    def __str__(self) -> str:
        allowed = tolerance_us(measured_us=self.measured_us, attention_us=self.attention_us)
        interval = _interval(self.ci_us)
        text = (
            f"P={self.world_size} S={self.seq_len} H={self.num_heads} {self.kernel}: {self.which} cost predicted "
            f"{self.predicted_us:+.1f}, measured {self.measured_us:+.1f} us ({interval}; allowed {allowed:.1f})"
        )
        if self.equal_clock_us is not None:
            text += f"; at equal clocks {self.equal_clock_us:+.1f} us ({_interval(self.equal_clock_ci_us)})"
        return text


def _interval(ci_us: float | None) -> str:
    return "one round" if ci_us is None else f"± {ci_us:.1f}"


def compare(line: Mapping[str, Any]) -> list[Comparison]:
    """The costs of a sweep line that hold both figures; none for a line without prediction."""
    found = []
    for which in ("sender", "ready"):
        predicted, measured = line.get(f"predicted_{which}_us"), line.get(f"cost_{which}_us")
        if predicted is None or measured is None:
            continue
        found.append(
            Comparison(
                world_size=line["world_size"],
                seq_len=line["seq_len"],
                num_heads=line["num_heads"],
                kernel=str(line.get("kernel", "")),
                which="sender" if which == "sender" else "ready",
                predicted_us=predicted,
                measured_us=measured,
                ci_us=line.get(f"cost_{which}_ci_us"),
                attention_us=line["fa_only_us"],
                # of ranks that wait for each other no one clock tells
                equal_clock_us=line.get("cost_sender_equal_clock_us") if which == "sender" else None,
                equal_clock_ci_us=line.get("cost_sender_equal_clock_ci_us") if which == "sender" else None,
            )
        )
    return found


def report(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a person reads below a sweep: one sentence, and one for each cost that lies apart. Empty where nothing was
    predicted."""
    found = [comparison for line in lines for comparison in compare(line)]
    if not found:
        return []
    count = {v: sum(c.verdict == v for c in found) for v in ("agree", "undecided", "apart")}
    apart = [c for c in found if c.verdict == "apart"]
    clocks = sum(c.verdict == "agree" and c.by_clocks for c in found)
    by_clocks = f" ({clocks} at equal clocks)" if clocks else ""
    head = (
        f"X-Stage: {count['agree']} of {len(found)} costs as predicted{by_clocks}, "
        f"{count['undecided']} undecided (the measurement scatters too much), {count['apart']} apart"
    )
    if not apart:
        return [head]
    told = [head, *(f"  apart: {c}" for c in apart)]
    if any(c.by_clocks for c in apart):
        told.append(
            "  as predicted at equal clocks: at its power limit the GPU lowers its clock, which the model does not know"
        )
    if not all(c.by_clocks for c in apart):
        told.append(
            "  the model, the profile or the kernel is not what it was: calibrate again, then look at the terms"
        )
    return told
