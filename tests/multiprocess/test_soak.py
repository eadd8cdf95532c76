"""`fa-a2a soak` between CPU processes: short runs each time; thousands of delayed rounds and the long soak if asked."""

import json

import pytest
import torch

from fa_a2a.bench import soak
from fa_a2a.errors import FaA2AError
from fa_a2a.ops import cpu


def run(rank, size, path, calls, longest_us, forgetful=False):
    real = cpu.attention_tile
    if forgetful and rank == 1:  # once in a while a tile that is not quite right
        count = iter(range(1 << 40))
        tile = lambda *args: tuple(t + (next(count) % 101 == 0) for t in real(*args))
        cpu.attention_tile = tile
    try:
        soak.body(torch.device("cpu"), calls, longest_us, False, path)
    except FaA2AError as error:
        return str(error)
    finally:
        cpu.attention_tile = real
    return ""


def soaked(ranks, tmp_path, size, calls, longest_us, **options):
    """The recorded line, and each rank's error."""
    path = tmp_path / "soak.jsonl"
    errors = ranks(size).run(run, path=path, calls=calls, longest_us=longest_us, timeout_s=3000, **options)
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    return line, errors


def check(line, errors, calls):
    assert errors == [""] * len(errors)
    assert (line["kind"], line["calls"], line["epochs"], line["wrong"]) == ("soak", calls, calls, 0)
    assert line["symmetric_bytes_end"] == line["symmetric_bytes_start"]
    assert line["resident_bytes_end"] - line["resident_bytes_start"] < 16 << 20, "memory is flat"


@pytest.mark.parametrize(("size", "longest_us"), [(2, 0.0), (3, 500.0), (8, 500.0)])
def test_a_few_hundred_calls(ranks, tmp_path, size, longest_us):
    check(*soaked(ranks, tmp_path, size, 300, longest_us), 300)


def test_a_wrong_output_is_found(ranks, tmp_path):
    line, errors = soaked(ranks, tmp_path, 2, 60, 0.0, forgetful=True)
    assert line["wrong"] > 0
    assert all("outputs must be bitwise those of the serial path" in error for error in errors)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_five_thousand_delayed_rounds(ranks, tmp_path):
    check(*soaked(ranks, tmp_path, 4, 5000, 3000.0), 5000)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_calls(ranks, tmp_path):
    line, errors = soaked(ranks, tmp_path, 2, 100_000, 0.0)
    check(line, errors, 100_000)
    assert line["call_us_late"] < 3 * line["call_us_early"], "no drift beyond what a busy machine does"
