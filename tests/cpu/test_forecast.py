"""Predictions are written before the measurement, with the profile's hash and the time; none is made up."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from fa_a2a.bench import forecast, main
from fa_a2a.bench.sweep import Case
from fa_a2a.xstage import design, load_profile, profile_hash, save_profile
from fa_a2a.xstage.speeds import shipped_speeds

CASE = Case(seq_len=4608, num_heads=24, head_dim=128, batch=1, dtype="bfloat16", kernel="fa4", rounds=2)


def fields(case=CASE, ranks=4, kernel="persistent", profile="h200x4"):
    return forecast.fields(case, ranks, design(kernel), load_profile(profile))


def test_fields_of_a_line():
    found = fields()
    assert (found["predicted_sender_us"], found["predicted_ready_us"]) == (2.78, 5.78)
    assert sum(found["predicted_terms_us"].values()) == pytest.approx(found["predicted_sender_us"], abs=0.03)
    assert (found["predicted_design"], found["profile"]) == ("persistent", "h200x4")
    assert found["profile_hash"] == profile_hash(load_profile("h200x4"))
    assert found["predicted_at"].endswith("Z")
    twice = fields(dataclasses.replace(CASE, batch=2))
    assert twice["predicted_sender_us"] == pytest.approx(2 * found["predicted_sender_us"], abs=0.02)
    assert fields(profile="h200x4", kernel="stock")["predicted_sender_us"] == 7.78


def test_fields_say_whose_rate_of_attention_it_is():
    assert fields()["predicted_attention"] == "710.0 TFLOP/s, the profile's at head_dim 128"
    small = fields(dataclasses.replace(CASE, head_dim=64))["predicted_attention"]
    speeds = shipped_speeds("NVIDIA H200")
    assert speeds["fa4", 64].tflops != speeds["fa3", 64].tflops
    assert small.startswith(f"{speeds['fa4', 64].tflops} TFLOP/s, measured of fa4 at head_dim 64")
    fa3 = fields(dataclasses.replace(CASE, head_dim=64, kernel="fa3"), kernel="fa3")["predicted_attention"]
    assert fa3.startswith(f"{speeds['fa3', 64].tflops} TFLOP/s, measured of fa3 at head_dim 64")


def test_which_profile(tmp_path):
    assert forecast.profile_for(None, 2, "NVIDIA H200") == load_profile("h200x2")
    assert "no profile of NVIDIA H200 x 8 is shipped" in forecast.profile_for(None, 8, "NVIDIA H200")
    assert "is for 4 ranks; got 2" in forecast.profile_for("h200x4", 2, "NVIDIA H200")
    assert "is for 'NVIDIA H200'" in forecast.profile_for("h200x4", 4, "NVIDIA B200")
    mine = dataclasses.replace(load_profile("h200x2"), name="mine", rate_gb_s=300.0, rate_range_gb_s=None)
    save_profile(mine, tmp_path / "mine.json")
    assert forecast.profile_for(str(tmp_path / "mine.json"), 2, "NVIDIA H200") == mine


def test_cpu_processes_have_no_prediction():
    found = forecast.predict(dataclasses.replace(CASE, kernel="cpu"), 2, torch.device("cpu"))
    assert found == {"predicted_sender_us": None, "predicted_ready_us": None}


def test_the_prediction_is_on_file_when_the_measurement_begins(tmp_path, monkeypatch):
    out = tmp_path / "sweep.jsonl"

    def measure(case, device, tick, prediction):
        (line,) = (json.loads(text) for text in out.read_text().splitlines())
        assert line["kind"] == "prediction" and line["seq_len"] == case.seq_len
        assert {name: line[name] for name in prediction} == prediction
        return {"kind": "sweep", "device": "CPU"} | prediction

    monkeypatch.setattr(main, "measure", measure)
    monkeypatch.setattr(main, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 4))
    monkeypatch.setattr(forecast, "predict", lambda case, ranks, device, measured_with: fields(case, ranks))
    main.sweep_body(torch.device("cpu"), [CASE], out)
    before, after = (json.loads(text) for text in out.read_text().splitlines())
    assert after["predicted_at"] == before["predicted_at"]


def test_what_two_gpus_are_to_measure_of_four_ranks_is_written_down_as_that(tmp_path, monkeypatch):
    out = tmp_path / "emulated.jsonl"
    monkeypatch.setattr(forecast, "predict", lambda case, ranks, device, measured_with: fields(case, ranks))
    expected = forecast.written_down(CASE, 4, torch.device("cpu"), out, measured_with=2)
    assert forecast.written_down(CASE, 4, torch.device("cpu"), None, measured_with=2).keys() == expected.keys()
    (line,) = (json.loads(text) for text in out.read_text().splitlines())
    assert (line["kind"], line["world_size"], line["num_ranks"]) == ("prediction", 2, 4)
    assert line["predicted_sender_us"] == expected["predicted_sender_us"]


def test_preview_for_a_machine_without_gpus():
    text = "\n".join(forecast.preview([2, 4, 8]))
    assert "X-Stage for NVIDIA H200 x 2 (profile h200x2)" in text and "NVIDIA H200 x 4" in text
    assert "8 ranks: no profile of a GPU x 8 is shipped" in text
    row = next(line for line in text.splitlines() if line.startswith("   4608  persistent       2.8"))
    assert row.split("|")[0].split() == ["4608", "persistent", "2.8", "5.8"]
    asked = "\n".join(forecast.preview([2], "h200x4"))
    assert "is for 4 ranks; got 2" in asked
