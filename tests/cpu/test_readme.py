"""The README says what the code and the recorded lines say."""

from pathlib import Path

import pytest

from fa_a2a.bench.readme import fill
from fa_a2a.bench.record import read
from fa_a2a.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


def recorded():
    return [line for path in sorted((ROOT / "benchmarks/results").glob("*.jsonl")) for line in read(path)]


def test_tables_are_made_from_the_recorded_lines():
    text = (ROOT / "README.md").read_text()
    assert fill(text, recorded()) == text


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
