"""Every recorded sweep line beside the model: a table of which costs were as predicted, kept by hand.

Tolerance: 5 us, 25 % of the cost or 0.5 % of attention, whichever is largest. agree: within; apart: outside; undecided:
the measurement's 95 % interval is wider than the tolerance. A line that is new here may be of the first kind or the
last; one that is apart fails until it is written down, which is to say looked into.
"""

import itertools
import json
import statistics
from pathlib import Path

import pytest

from fa_a2a.errors import ConfigurationError
from fa_a2a.xstage import design, predict_cost, shipped_profile, wait_for_slowest_us
from fa_a2a.xstage.convergence import OF_ATTENTION, TOLERANCE_US, compare, tolerance_us

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
STOCK_UNTIL = "2026-11-30T02"  # lines of kernel fa4 older than this are the stock kernel's

# (P, kernel design, S, H, date): sender-visible, ready. Why a line is apart:
# - The stock kernel's ready time at (8192, 24, P = 4): 20.1 us for 28.5 +- 2.8, 1.3 us beyond the tolerance, 3.0 of the
#   difference in the sender-visible time, the rest in its signal kernel, which took 11.4 us for the profile's 6.0. What
#   runs since ends calls inside the kernel.
# - fa3's ready time at (8192, 12, P = 2): 10.3 +- 3.8 us for 4.4, 0.9 beyond the tolerance. Ready times of other lines
#   lie as far above, with wider intervals: ranks wait for the GPU that is slower at the moment (xstage/cost.py).
EXPECTED = {
    (2, "persistent", 4608, 24, "2026-11-30T13:48"): ("agree", "agree"),
    (2, "persistent", 8192, 24, "2026-11-30T13:48"): ("agree", "agree"),
    (2, "persistent", 16384, 24, "2026-11-30T13:48"): ("agree", "undecided"),
    (2, "persistent", 32768, 24, "2026-11-30T13:49"): ("agree", "undecided"),
    (2, "persistent", 4608, 12, "2026-11-30T13:49"): ("agree", "agree"),
    (2, "persistent", 8192, 12, "2026-11-30T13:49"): ("agree", "agree"),
    (2, "persistent", 16384, 12, "2026-11-30T13:49"): ("agree", "undecided"),
    (2, "persistent", 32768, 12, "2026-11-30T13:49"): ("agree", "undecided"),
    (2, "persistent", 65536, 24, "2026-11-30T13:49"): ("agree", "undecided"),
    (2, "persistent", 65536, 12, "2026-11-30T13:50"): ("agree", "undecided"),
    (2, "fa3", 4608, 24, "2026-11-30T13:50"): ("agree", "agree"),
    (2, "fa3", 8192, 24, "2026-11-30T13:50"): ("agree", "undecided"),
    (2, "fa3", 16384, 24, "2026-11-30T13:50"): ("agree", "undecided"),
    (2, "fa3", 32768, 24, "2026-11-30T13:50"): ("agree", "undecided"),
    (2, "fa3", 4608, 12, "2026-11-30T13:50"): ("agree", "agree"),
    (2, "fa3", 8192, 12, "2026-11-30T13:50"): ("agree", "apart"),
    (2, "fa3", 16384, 12, "2026-11-30T13:50"): ("agree", "undecided"),
    (2, "fa3", 32768, 12, "2026-11-30T13:50"): ("agree", "undecided"),
    (4, "stock", 4608, 24, "2026-11-30T01:50"): ("agree", "agree"),
    (4, "stock", 8192, 24, "2026-11-30T01:50"): ("agree", "apart"),
}


def recorded(pattern, kind):
    lines = (json.loads(text) for path in sorted(RESULTS.glob(pattern)) for text in path.read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def design_of_line(line):
    if line["kernel"] == "fa3":
        return "fa3"
    return "stock" if line["date"] < STOCK_UNTIL else "persistent"


def key_of(line):
    return (line["world_size"], design_of_line(line), line["seq_len"], line["num_heads"], line["date"][:16])


def todays(line):
    """The line with the model's prediction of today, for the shipped profile of its GPUs."""
    kernel, profile = design(design_of_line(line)), shipped_profile(line["world_size"], line["device"])
    names = ("batch", "seq_len", "num_heads", "head_dim")
    shape = kernel.shape(num_ranks=line["world_size"], **{name: line[name] for name in names})
    cost = predict_cost(shape, profile, kernel)
    return line | {"predicted_sender_us": cost.sender_us, "predicted_ready_us": cost.ready_us}


def table(lines):
    """(verdicts by line, the same as text with the figures)."""
    found, text = {}, []
    for line in lines:
        comparisons = compare(line)
        found[key_of(line)] = tuple(c.verdict for c in comparisons)
        text += [f"{c.verdict:9}  {c}" for c in comparisons]
    return found, "\n".join(text)


def sweeps():
    return [line for line in recorded("**/sweep_h200x*.jsonl", "sweep") if line["device"] != "CPU"]


def test_every_recorded_sweep_line():
    found, text = table(map(todays, sweeps()))
    print(text)
    known = {key: verdicts for key, verdicts in found.items() if key in EXPECTED}
    assert known == EXPECTED, text
    new = {key: verdicts for key, verdicts in found.items() if key not in EXPECTED and "apart" in verdicts}
    assert not new, f"costs apart from the model that EXPECTED does not explain: {new}\n{text}"


def test_at_equal_clocks_every_sender_visible_cost_is_as_predicted():
    """A GPU at its power limit changes its clock from round to round, by up to 37 %, and the times with it. The
    cycles do not scatter: with the clock beside each time, nothing is left undecided. (Ready times are those of ranks
    that wait for each other, whichever is slower at the moment; no one clock goes with them.)"""
    lines = [line for line in map(todays, sweeps()) if "cost_sender_equal_clock_us" in line]
    assert {(line["kernel"], line["seq_len"]) for line in lines} >= {("fa4", 4608), ("fa4", 65536), ("fa3", 32768)}
    names = {"cost_sender_us": "cost_sender_equal_clock_us", "cost_sender_ci_us": "cost_sender_equal_clock_ci_us"}
    for line in lines:
        clocked = line | {name: line[other] for name, other in names.items()}
        assert compare(clocked)[0].verdict == "agree", compare(clocked)[0]
        assert line["cost_sender_equal_clock_ci_us"] <= max(0.6, 1.1 * line["cost_sender_ci_us"])


def test_the_table_tells_the_three_apart():
    """Made lines: a prediction of 3.5 us and attention of 200 us allow 5 us."""
    line = {"world_size": 2, "seq_len": 4608, "num_heads": 24, "kernel": "fa4", "fa_only_us": 200.0}
    line |= {"date": "2027-01-01T00:00:00Z", "predicted_sender_us": 3.5, "predicted_ready_us": 3.5}
    for cost_us, ci_us, want in [
        (8.0, 1.0, "agree"),
        (9.0, 1.0, "apart"),
        (9.0, 6.0, "undecided"),
        (15.0, 6.0, "apart"),
    ]:
        fields = {f"cost_{which}_us": cost_us for which in ("sender", "ready")}
        fields |= {f"cost_{which}_ci_us": ci_us for which in ("sender", "ready")}
        found, text = table([line | fields])
        assert found == {(2, "persistent", 4608, 24, "2027-01-01T00:00"): (want, want)}
        assert text.startswith(want)


def test_what_was_written_down_before_a_measurement_holds_as_todays_model_does():
    """Publication was calibrated anew behind the sweep, on the same two GPUs: 4.4 us for the 3.3 that it was predicted
    with. That parts the two shapes of 8192 tokens, whose ready costs of 9.0 and 8.3 us lie at the tolerance's end."""
    own = [line for line in sweeps() if line["predicted_sender_us"] is not None]
    assert len(own) >= 5
    before = table(own)[0]
    parted = {key for key, verdicts in before.items() if key in EXPECTED and verdicts != EXPECTED[key]}
    assert all(before[key][0] == EXPECTED[key][0] for key in before.keys() & EXPECTED.keys())
    assert {(design, seq_len, heads) for _, design, seq_len, heads, _ in parted} == {
        ("persistent", 8192, 24),
        ("persistent", 8192, 12),
    }


def test_waiting_for_the_slowest_rank_in_each_call_is_below_the_tolerance():
    """Calls of one H200 in a row, every store local, cut into as long parts as the sweep times at once (6 ms). The
    parts stand for ranks that go on their own. Up to 8 ranks, waiting in each call for the slowest adds at most 0.6 us
    or three thousandths to what the slowest rank takes alone, below two thirds of the tolerance; for 2 ranks it is a
    thousandth."""
    lines = [line for line in recorded("kernel_designs_h200.jsonl", "designs") if "calls_us" in line]
    assert {line["seq_len"] for line in lines} == {4608, 8192, 16384, 32768, 65536}
    for line in lines:
        calls = line["calls_us"]
        call_us = statistics.mean(calls)
        length = max(2, line["calls_per_round"])
        parts = [calls[i : i + length] for i in range(0, len(calls) - length + 1, length)]
        for ranks in (2, 4, 8):
            groups = [parts[i : i + ranks] for i in range(0, len(parts) - ranks + 1)]
            if not groups:
                continue
            waits_us = statistics.mean(map(wait_for_slowest_us, groups))
            share = 0.001 if ranks == 2 else 0.003
            assert 0 <= waits_us <= max(0.6, share * call_us), (line["seq_len"], line["local_heads"], ranks)
            assert waits_us < 2 / 3 * max(TOLERANCE_US, OF_ATTENTION * call_us)


def test_nor_does_it_show_between_two_gpus():
    """2x H200: ready beyond sender-visible time and publication, where a run is sharper than the tolerance."""
    seen = 0
    for line in sweeps():
        if line["world_size"] != 2:
            continue
        publish_us = shipped_profile(2, line["device"]).publish_inside_us
        rounds = line["rounds_us"]
        rest = [a - b - publish_us for a, b in zip(rounds["fused_ready"], rounds["fused_sender"], strict=True)]
        half_width_us = 2.4 * statistics.stdev(rest) / len(rest) ** 0.5
        allowed_us = tolerance_us(measured_us=0.0, attention_us=line["fa_only_us"])
        if half_width_us < allowed_us:
            seen += 1
            assert abs(statistics.mean(rest)) < allowed_us + half_width_us
    assert seen >= 4


def test_wait_for_the_slowest_by_hand():
    assert wait_for_slowest_us([[1.0, 3.0], [3.0, 1.0]]) == 1.0, "in turn slow: 3 a call, either alone takes 2"
    assert wait_for_slowest_us([[1.0, 1.0], [3.0, 3.0]]) == 0.0, "always the same one is slow: it is so alone, too"
    assert wait_for_slowest_us([[1.0, 2.0, 3.0]]) == 0.0
    assert wait_for_slowest_us(list(itertools.repeat([2.0, 4.0], 8))) == 0.0
    for wrong in ([], [[]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ConfigurationError, match="as many calls of each rank"):
            wait_for_slowest_us(wrong)
