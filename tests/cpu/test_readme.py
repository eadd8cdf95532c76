"""The README says what the code and the recorded lines say."""

import re
from pathlib import Path

import pytest

from fa_a2a.bench.readme import fill
from fa_a2a.bench.readme_parts import is_shown
from fa_a2a.bench.record import read
from fa_a2a.errors import ConfigurationError
from fa_a2a.xstage.convergence import OF_ATTENTION, OF_COST, TOLERANCE_US

ROOT = Path(__file__).parents[2]


def recorded():
    return [line for path in sorted((ROOT / "benchmarks/results").glob("*.jsonl")) for line in read(path)]


def test_tables_are_made_from_the_recorded_lines():
    text = (ROOT / "README.md").read_text()
    assert fill(text, recorded()) == text


def prose():
    """The README without its tables, in one line."""
    return " ".join(
        re.sub("<!-- (\\w+) -->.*?<!-- /\\1 -->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL).split()
    )


def span(values, digits=0):
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def test_the_opening_has_the_lines_figures():
    lines = [x for x in recorded() if x["kind"] == "layer" and x["mode"] == "graph" and x["num_heads"] == 24]
    over = {name: [x["vs_attention"] for x in lines if x["method"].startswith(name)] for name in METHODS}
    assert {x["seq_len"] for x in lines} == {4608, 8192, 16384, 32768}
    ours, nccl, symmetric, diffusers = (span(over[name], digits) for name, digits in METHODS.items())
    assert f"takes {ours} times attention alone" in prose()
    assert f"with NCCL {nccl}, torch's symmetric memory {symmetric}, diffusers' {diffusers}." in prose()


METHODS = {"overlapped": 2, "nccl": 1, "symm_mem": 1, "diffusers": 1}


def test_clocks_move_as_said():
    """From a line's slowest round to its fastest, of whichever method, in the table's rows."""
    lines = [x for x in recorded() if x["kind"] == "sweep" and is_shown(x) and x["num_heads"] == 24]
    clocks = [[mhz for rounds in x["rounds_mhz"].values() for mhz in rounds] for x in lines if x["seq_len"] >= 8192]
    assert f"moves by {span(100 * (max(mhz) / min(mhz) - 1) for mhz in clocks)} % in a row's rounds" in prose()


def test_costs_lie_as_far_from_what_was_predicted_as_said():
    assert (
        f"(within {TOLERANCE_US:g} us, {OF_COST:.0%} or {OF_ATTENTION:.1%} of attention)".replace("%", " %") in prose()
    )
    lines = [x for x in recorded() if x["kind"] == "sweep" and is_shown(x)]
    most = max((x["cost_ready_us"] - x["predicted_ready_us"]) / x["fa_only_us"] for x in lines)
    assert f"up to {100 * most:.1f} % of attention above" in prose()


def test_length():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def test_every_sweep_line_is_bitwise_equal():
    assert all(line["bitwise_equal"] for line in recorded() if line["kind"] == "sweep")


def test_fenced_litmus_variants_are_clean_and_a_control_failed():
    stale = {line["variant"]: line["stale"] for line in recorded() if line["kind"] == "litmus"}
    controls = ("control", "st_control", "bulk_read_control")
    assert not any(words for name, words in stale.items() if name not in controls)
    assert stale["control"] or stale["st_control"]


def test_recorded_soaks_were_clean():
    soaks = [line for line in recorded() if line["kind"] == "soak"]
    for gpu in (False, True):
        assert max(line["calls"] for line in soaks if (line["device"] != "CPU") == gpu) >= 100_000
    assert not any(line["wrong"] or line["wrong_traffic"] for line in soaks)
    for line in soaks:
        assert line["symmetric_bytes_end"] == line["symmetric_bytes_start"]
        assert line["device_bytes_end"] <= line["device_bytes_start"]
        assert resident_growth(line) < 1 << 20


def resident_growth(line):
    return line["resident_bytes_end"] - line["resident_bytes_start"]


def test_unknown_marker_is_an_error():
    with pytest.raises(ConfigurationError, match="no table"):
        fill("<!-- nothing -->\n<!-- /nothing -->", [])
