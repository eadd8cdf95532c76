"""The Burst-Gap equations: the paper's numbers, and properties that must hold everywhere."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_a2a.errors import FaA2AError
from fa_a2a.xstage import burst_gap as bg

PAPER_V = 148 * 32 * 1024
PAPER = {"volume_bytes": PAPER_V, "rate_gb_s": 717.0, "floor_us": 0.76}
PAPER_Q = 4.25 * 1024**2

volumes = st.floats(0, 1e9)
rates = st.floats(1, 5000)
times = st.floats(0, 1e5)


def close(value: float) -> object:
    """Rounding of sums of times: 1e-9 relative to the operands, which are at most about 1e6 us."""
    return pytest.approx(value, rel=1e-9, abs=1e-6)


def test_paper_recovery_gap() -> None:
    assert bg.recovery_gap_us(**PAPER) == pytest.approx(6.0, abs=0.01)


def test_paper_peak_outstanding_and_bounds() -> None:
    assert bg.peak_outstanding_bytes(**PAPER) / 1024**2 == pytest.approx(4.1, abs=0.01)
    bounds = bg.design_bounds(**PAPER, gap_us=6.01, capacity_bytes=PAPER_Q)
    assert bounds.rate_holds and bounds.capacity_holds and bounds.hold
    assert bounds.capacity_margin_bytes / 1024**2 == pytest.approx(0.14, abs=0.01)
    short = bg.design_bounds(**PAPER, gap_us=5.9, capacity_bytes=PAPER_Q)
    assert not short.rate_holds and short.capacity_holds and not short.hold


def test_paper_capacity_knee() -> None:
    """The knee at 33 KiB for each of 148 producers (4.77 MiB) and the drain during issue give Q = 4.25 MiB."""
    knee_bytes = 148 * 33 * 1024
    assert knee_bytes / 1024**2 == pytest.approx(4.77, abs=0.005)
    capacity = bg.peak_outstanding_bytes(volume_bytes=knee_bytes, rate_gb_s=717.0, floor_us=0.76)
    assert capacity / 1024**2 == pytest.approx(4.25, abs=0.005)


def test_h200_values() -> None:
    """4x H200, 132 SMs of 32 KiB, R = 354 GB/s: drain 12.2 us at gap 0, recovery predicted at 11.7 us (st)."""
    burst = {"volume_bytes": 132 * 32768, "rate_gb_s": 354.0}
    assert bg.drain_us(**burst) == pytest.approx(12.2, abs=0.05)
    assert bg.recovery_gap_us(**burst, floor_us=0.56) == pytest.approx(11.7, abs=0.05)
    for gap_us in (0.0, 4.0, 20.0):
        assert bg.completion_coupled_period_us(**burst, gap_us=gap_us) == pytest.approx(gap_us + 12.22, abs=0.01)


# (model, wave span, interleaved span, L2 main loop, L1 main loop, printed wave stall, printed interleaved stall)
TABLE_2 = [
    ("DiT-MoE", 9.93, 3.77, 5.30, 9.77, 4.63, 0.0),
    ("Qwen3.5", 9.17, 3.82, 4.24, 14.40, 4.94, 0.0),
    ("Hy3", 9.68, 3.59, 6.09, 10.79, 3.60, 0.0),
    ("MiMo-V2.5", 9.22, 3.94, 7.77, 7.57, 1.45, 0.0),
    ("GLM-5.2", 9.53, 3.63, 7.99, 18.77, 1.54, 0.0),
    ("DSv4-Flash", 9.48, 3.83, 8.01, 7.40, 1.47, 0.0),
    ("DSv4-Pro", 7.88, 3.55, 9.54, 11.57, 0.0, 0.0),
]


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: row[0])
def test_paper_table_2(row: tuple[str, float, float, float, float, float, float]) -> None:
    _, wave_span, inter_span, l2_us, l1_us, wave_stall, inter_stall = row
    assert bg.stall_us(span_us=wave_span, cover_us=l2_us) == pytest.approx(wave_stall, abs=0.011)
    assert bg.stall_us(span_us=inter_span, cover_us=l1_us) == pytest.approx(inter_stall, abs=0.011)


@given(volumes, rates, times, times, times)
def test_issue_time_properties(volume: float, rate: float, floor: float, gap: float, more: float) -> None:
    burst = {"volume_bytes": volume, "rate_gb_s": rate, "floor_us": floor}
    issue = bg.issue_us(**burst, gap_us=gap)
    assert issue >= floor
    assert bg.issue_us(**burst, gap_us=gap + more) <= issue
    assert bg.issue_us(**burst | {"volume_bytes": volume + 1e6}, gap_us=gap) >= issue
    assert bg.backpressure_us(**burst, gap_us=gap) == close(issue - floor)
    assert bg.period_us(**burst, gap_us=gap) == close(issue + gap)
    coupled = bg.completion_coupled_period_us(volume_bytes=volume, rate_gb_s=rate, gap_us=gap)
    drain = bg.drain_us(volume_bytes=volume, rate_gb_s=rate)
    assert bg.period_us(**burst, gap_us=gap) <= max(coupled, floor + gap)
    assert coupled == close(gap + drain)


@given(volumes, rates, times)
def test_recovery_gap_is_where_backpressure_ends(volume: float, rate: float, floor: float) -> None:
    burst = {"volume_bytes": volume, "rate_gb_s": rate, "floor_us": floor}
    recovery = bg.recovery_gap_us(**burst)
    assert bg.backpressure_us(**burst, gap_us=recovery) == close(0.0)
    assert bg.backpressure_us(**burst, gap_us=recovery / 2) == close(recovery / 2)


@given(volumes, rates, times, st.floats(0, 1e9))
def test_isolated_burst_leaves_the_floor_where_the_capacity_bound_breaks(
    volume: float, rate: float, floor: float, capacity: float
) -> None:
    burst = {"volume_bytes": volume, "rate_gb_s": rate, "floor_us": floor}
    isolated = bg.isolated_issue_us(**burst, capacity_bytes=capacity)
    assert floor <= isolated <= bg.issue_us(**burst, gap_us=0.0)
    margin = bg.design_bounds(**burst, gap_us=0.0, capacity_bytes=capacity).capacity_margin_bytes
    assert isolated - floor == close(max(0.0, -margin) / (rate * 1e3))


@given(volumes, rates, times, times)
def test_rate_bound_agrees_with_recovery_gap(volume: float, rate: float, floor: float, gap: float) -> None:
    burst = {"volume_bytes": volume, "rate_gb_s": rate, "floor_us": floor}
    recovery = bg.recovery_gap_us(**burst)
    holds = bg.design_bounds(**burst, gap_us=gap, capacity_bytes=0.0).rate_holds
    if abs(gap - recovery) > 1e-6 * (1 + gap + floor):
        assert holds == (gap > recovery)


def test_no_cycle_at_all() -> None:
    nothing = {"rate_gb_s": 354.0, "floor_us": 0.0, "gap_us": 0.0, "capacity_bytes": 0.0}
    assert bg.design_bounds(volume_bytes=0, **nothing).hold
    assert bg.design_bounds(volume_bytes=1, **nothing).rate_margin_gb_s == -math.inf


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["volume_bytes", "rate_gb_s", "floor_us", "gap_us", "capacity_bytes"])
def test_bad_arguments_name_themselves(name: str, bad: float) -> None:
    good = {**PAPER, "gap_us": 1.0, "capacity_bytes": PAPER_Q}
    with pytest.raises(FaA2AError, match=name):
        bg.design_bounds(**good | {name: bad})


def test_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rate_gb_s must be finite and positive"):
        bg.drain_us(volume_bytes=1.0, rate_gb_s=0.0)
