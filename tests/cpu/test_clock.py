"""Clocks of SMs from two tables, and times at another clock."""

import statistics

import pytest

from fa_a2a.bench import sweep
from fa_a2a.bench.clock import at_clock_of, mean_mhz
from fa_a2a.errors import FaA2AError


def test_mean_clock_is_the_median_of_the_sms_seen_at_both_ends():
    begin = [(10, 1000), (0, 0), (50, 1000), (7, 1000), (9, 1000)]
    end = [(1510, 2000), (3000, 2000), (1050, 2000), (1407, 2000), (9, 1000)]
    assert mean_mhz(begin, end) == pytest.approx(1400), "1500, 1000 and 1400; one seen at the end alone, one not again"
    with pytest.raises(FaA2AError, match="no SM told its clock"):
        mean_mhz([(0, 0)], [(5, 7)])


def test_time_at_another_clock_has_the_same_cycles():
    assert at_clock_of([100.0, 100.0], [1500.0, 1200.0], [1200.0, 1200.0]) == [125.0, 100.0]


def test_a_cost_that_the_clock_makes_is_gone_at_equal_clocks():
    """Two methods of 60 million cycles, one at 1500 MHz, one at 1480; a third takes 1 % more at the lower clock."""
    rounds = [1.0, 1.01, 0.99]
    clocks = {"fused_local": 1500.0, "fused_sender": 1480.0, "fused_ready": 1480.0, "fa_only": 1500.0}
    cycles = dict.fromkeys(clocks, 60e6) | {"fused_ready": 60.6e6}
    mhz = {name: [value * r for r in rounds] for name, value in clocks.items()}
    times = {name: [cycles[name] / f for f in mhz[name]] for name in clocks}
    fields = sweep.differences_at_equal_clocks(times, mhz)
    assert statistics.median(times["fused_sender"]) - 40000 > 500
    assert fields["cost_sender_equal_clock_us"] == fields["e_res_sender_equal_clock_us"] == 0
    assert fields["cost_ready_equal_clock_us"] == pytest.approx(400, abs=1)
    assert fields["sm_mhz"] == {name: pytest.approx(value) for name, value in clocks.items()}
