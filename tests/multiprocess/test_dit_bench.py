"""The benchmark of whole models between CPU processes: its lines, and what it checks."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
import fa_a2a
from fa_a2a.bench import dit
from fa_a2a.bench.dit_case import Bench
from fa_a2a.bench.dit_models import Case
from fa_a2a.comm.group import resolve
from fa_a2a.errors import FaA2AError
from fa_a2a.integrations import diffusers as integration

CASES = [Case("flux", 64, 64, text=16, rounds=2, tiny=True), Case("wan", 64, 64, 5, text=16, rounds=1, tiny=True)]


def bench(rank, size, out, timed):
    fa_a2a.close()
    dit.body(torch.device("cpu"), CASES, ("eager",), timed, Path(out))


def wrong(rank, size):
    """An output that is off on rank 1 alone; what each rank is told."""
    made = Bench(CASES[0], resolve(None), torch.device("cpu"))
    try:
        assert made.check("right", made.want.clone()) == 0
        made.check("wrong", made.want.roll(rank, dims=1))
    except FaA2AError as error:
        return str(error)
    finally:
        integration.disable()
        fa_a2a.close()


def test_lines(ranks, tmp_path):
    out = tmp_path / "dit.jsonl"
    ranks(2).run(bench, out=str(out), timed=True)
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [x["method"] for x in lines] == 2 * list(dit.METHODS)
    assert [(x["model"], x["resolution"], x["frames"], x["seq_len"]) for x in lines[::3]] == [
        ("flux", "64x64", 1, 32),
        ("wan", "64x64", 5, 32),
    ]
    for x in lines:
        assert (x["kind"], x["device"], x["world_size"], x["mode"]) == ("dit", "CPU", 2, "eager")
        assert x["median_ms"] > 0 and x["max_difference"] < 1e-4 < x["wrong_difference"] / 1000 and x["host_ms"] is None
        assert (x["workspace_bytes"] > 4 * 32 * 4 * 32 * 4 / 2) == (x["method"] == "fa_a2a")
    assert {x["attention"] for x in lines if x["method"] == "fa_a2a"} == {"cpu, fused"}
    assert [len(x["rounds_ms"]) for x in lines] == [2, 2, 2, 1, 1, 1]


def test_a_check_has_differences_and_no_times(ranks, tmp_path):
    out = tmp_path / "dit.jsonl"
    ranks(2).run(bench, out=str(out), timed=False)
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(x["kind"], x["method"], x["mode"], x["model"]) for x in lines] == [
        ("dit_check", "fa_a2a", "eager", "flux"),
        ("dit_check", "fa_a2a", "eager", "wan"),
    ]
    for x in lines:
        assert 0 <= x["max_difference"] < 1e-4 < x["wrong_difference"] / 1000 and x["workspace_bytes"] > 0
        assert not [name for name in x if name.endswith("_ms")]


def test_a_wrong_output_on_one_rank_ends_the_run_on_all(ranks):
    for text in ranks(2).run(wrong):
        assert "wrong of flux 64x64 on 2 ranks differs" in text and "no time is reported" in text
