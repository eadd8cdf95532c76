"""The calibration's plan and lines, and the commands around them, on a machine without GPUs."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calibration_lines import CAPACITIES, FLOORS, RATE, make

from fa_a2a.bench import fitting, publication
from fa_a2a.bench.bursts import Launch, steady_us
from fa_a2a.bench.calibrate import line, plan, rank_count
from fa_a2a.bench.record import read
from fa_a2a.cli import main
from fa_a2a.errors import ConfigurationError, ProfileError
from fa_a2a.xstage import burst_gap as bg
from fa_a2a.xstage import load_profile
from fa_a2a.xstage.fit import fit
from fa_a2a.xstage.samples import read_runs

ROOT = Path(__file__).parents[2]


def fa_a2a(*arguments, cwd):
    """Standard output of the command, run as a user does."""
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "cute"))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "fa_a2a.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def refusal(capsys):
    """refusal(arguments): what the command says when it fails."""

    def run(*arguments):
        assert main([str(argument) for argument in arguments]) == 1
        return capsys.readouterr().err

    return run


@pytest.fixture
def samples(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in make(1, date="2026-01-01") + make(2, date="2026-01-02")))
    return path


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("num_sms", [132, 148])
def test_plan_stays_within_what_the_kernels_take(num_sms, quick):
    from fa4_a2a.burst import MAX_BURST_BYTES

    settings = plan(num_sms, quick)
    assert len(set(settings)) == len(settings)
    for s in settings:
        assert s.bytes_per_cta <= MAX_BURST_BYTES
        assert s.bytes_per_cta % s.slices == 0
        assert s.bytes_per_cta // s.slices % 16 == 0
        assert 1 <= s.num_ctas <= num_sms
    launch_us = sum(s.repeats * s.bursts * (s.gap_us + s.num_ctas * s.bytes_per_cta / 350e3) for s in settings)
    assert launch_us < 2e6, "a round takes seconds"


def ideal(setting, draw):
    """What a machine that obeys the model shows in one launch."""
    v, floor = setting.num_ctas * setting.bytes_per_cta, FLOORS[setting.store] * setting.bytes_per_cta / 32768
    law = {"volume_bytes": v, "rate_gb_s": RATE, "gap_us": setting.gap_us}
    period, behind = bg.period_us(**law, floor_us=floor), 0.0
    remote = setting.traffic != "local"
    if not remote:
        period = floor + setting.gap_us
    elif setting.experiment in ("fence", "fence_released"):
        period = bg.completion_coupled_period_us(**law)
    elif setting.experiment == "load":
        behind = 5.0
    issue = period - setting.gap_us
    if setting.experiment in ("isolated", "load", "paced", "waves") and remote:
        q = CAPACITIES[setting.store]
        issue = bg.isolated_issue_us(volume_bytes=v, rate_gb_s=RATE, floor_us=floor, capacity_bytes=q)
    noisy = [issue * draw.uniform(0.99, 1.01) for _ in range(setting.bursts)]
    return Launch(
        total_us=8 + setting.bursts * period * draw.uniform(0.995, 1.005),
        gap_us=setting.gap_us,
        issue_us=sum(noisy) / len(noisy),
        steady_us=period * draw.uniform(0.995, 1.005),
        slowest_us=noisy,
        median_us=noisy,
        behind_slowest_us=[behind] * setting.bursts,
        behind_median_us=[behind] * setting.bursts,
        done_us=noisy,
        block_us=sum(noisy),
    )


@pytest.mark.parametrize("quick", [False, True])
def test_planned_launches_become_lines_that_can_be_fitted(quick):
    draw = random.Random(1)
    common = {"kind": "calibrate", "device": "NVIDIA H200", "world_size": 4, "num_sms": 132}
    common |= {"date": "2026-01-01", "git": "", "content_hash": "", "versions": {}}
    lines = []
    for setting in plan(132, quick):
        senders = 1 if setting.traffic == "one_sender" else 4
        ranks = [
            [[ideal(setting, draw) for _ in range(setting.repeats * (rank < senders))] for _ in range(3)]
            for rank in range(4)
        ]
        lines.append(common | line(setting, ranks))
        assert len(lines[-1]["total_us"]) == 3
    (run,) = read_runs(json.loads(json.dumps(lines)))
    found = fit(run)
    assert found.rate_gb_s.value == pytest.approx(RATE, rel=0.01)
    for name, store in found.stores.items():
        assert store.issue_us.value == pytest.approx(FLOORS[name], rel=0.02)
        assert store.capacity.low_bytes * 0.99 <= CAPACITIES[name] <= store.capacity.high_bytes * 1.01
        assert store.drift_us is not None
        assert store.blocked_load_us == pytest.approx(5, rel=0.01)
        assert len(store.paced_us) == 4
        gaps = {s.gap_us for s in plan(132, quick) if s.experiment == "gap"}
        for law in (store.max_law, store.steady_law, store.coupled_law, store.free_law):
            assert {p.gap_us for p in law} == gaps
            assert max(abs(p.residual) for p in law) < 0.03


def test_total_is_the_slowest_ranks():
    draw = random.Random(1)
    setting = next(s for s in plan(132) if s.experiment == "gap")
    launches = [ideal(setting, draw) for _ in range(4)]
    assert line(setting, [[[x]] for x in launches])["total_us"] == [round(max(x.total_us for x in launches), 3)]


def test_steady_period_is_of_the_time_while_all_blocks_run():
    assert steady_us(torch.full((160, 132), 12.0).double()) == pytest.approx(12)
    fast, slow = torch.full((160, 60), 9.0).double(), torch.full((160, 72), 15.0).double()
    together = 132 / (60 / 9 + 72 / 15)
    assert steady_us(torch.cat((fast, slow), 1)) == pytest.approx(together)
    slow[100:] = 9.0  # once the fast have left, from 1440 us on
    assert steady_us(torch.cat((fast, slow), 1)) == pytest.approx(together)
    slow[:2] = 40.0  # the first bursts do not count
    assert steady_us(torch.cat((fast, slow), 1)) == pytest.approx(together)
    assert steady_us(fast[:1]) == pytest.approx(9)


def test_what_was_just_measured_is_told_from_what_the_file_held_before():
    before, now = [x | {"world_size": 2} for x in make(1)], make(2)
    assert fitting.like_the_last([*before, *now]) == now
    assert fitting.like_the_last([]) == []


def test_one_gpu_is_not_enough():
    with pytest.raises(ConfigurationError, match="two GPUs or more, got 1; give --samples"):
        rank_count(1)


# -- profiles ---------------------------------------------------------------------------------------------------------


def test_the_shipped_profile_is_what_the_recorded_calibration_gives():
    """Every number of it, attention's speed and publication too: nothing is taken over. Two runs; the newest counts."""
    lines = read(ROOT / "benchmarks/results/calibrate_h200x2.jsonl")
    runs = read_runs(lines)
    own = publication.found(lines, "NVIDIA H200", 2, 132)
    assert len(runs) == 2 and set(own) == {"tflops", "publish_us", "publish_inside_us"}
    found = [fit(run) for run in runs]
    assert fitting.profile_of(found[-1], measured=own) == load_profile("h200x2")
    assert load_profile("h200x2").source == "fa-a2a calibrate"
    assert found[0].rate_gb_s.value == pytest.approx(found[1].rate_gb_s.value, rel=0.005)


def test_attention_speed_is_taken_over_and_said(tmp_path):
    (run,) = read_runs(make())
    profile = fitting.profile_of(fit(run))
    assert (profile.name, profile.attention) == ("h200x4", load_profile("h200x4").attention)
    assert "attention's speed from h200x4; publish_us from h200x4" in profile.source
    given = fitting.profile_of(fit(run), name="mine", attention_tflops=500.0)
    assert (given.name, given.attention.tflops) == ("mine", 500.0)
    with pytest.raises(ProfileError, match="is for '148-SM NVIDIA GPU"):
        fitting.profile_of(fit(run), base="paper")


def test_publication_time_is_not_taken_from_another_number_of_ranks():
    (run,) = read_runs([x | {"world_size": 8} for x in make()])
    profile = fitting.profile_of(fit(run))
    assert (profile.name, profile.publish_us, profile.publish_inside_us) == ("h200x8", None, None)


def test_an_unknown_device_needs_attentions_speed():
    (run,) = read_runs([x | {"device": "NVIDIA B300"} for x in make()])
    with pytest.raises(ProfileError, match=r"attention's speed.*'NVIDIA B300'.*--attention-tflops or --base"):
        fitting.profile_of(fit(run))


# -- the commands -----------------------------------------------------------------------------------------------------


def test_samples_to_profile_and_plot(samples, tmp_path):
    pytest.importorskip("matplotlib")
    out = fa_a2a("calibrate", "--samples", samples, "--profile-out", "p/mine.json", "--name", "mine", cwd=tmp_path)
    assert out.count("all ranks sending") == 2
    assert "R of 2 runs" in out
    assert load_profile(tmp_path / "p/mine.json").date == "2026-01-02"
    assert (tmp_path / "p/mine.png").stat().st_size > 10000
    assert "panel.png" in fa_a2a("plot", samples, "--out", "panel.png", cwd=tmp_path)
    audit = fa_a2a("audit", "--seq-len", 8192, "--heads", 24, "--profile", "p/mine.json", cwd=tmp_path)
    assert audit.startswith("profile mine: NVIDIA H200, 4 ranks, 2026-01-02.")


def test_calibrate_says_what_is_wrong(samples, tmp_path, refusal):
    if not torch.cuda.is_available():
        assert "give --samples FILE" in refusal("calibrate")
    assert "no such samples file: none.jsonl" in refusal("calibrate", "--samples", "none.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text('{"kind": "litmus"}\n')
    assert "kind 'calibrate'" in refusal("calibrate", "--samples", other)
    assert "got litmus" in refusal("plot", other)
    bad = ("calibrate", "--samples", samples, "--attention-tflops", "-1")
    assert "--attention-tflops must be positive" in refusal(*bad)


def test_audit_says_which_bound_holds_and_every_term(tmp_path, capsys, refusal):
    shape = ("audit", "--seq-len", "8192", "--heads", "24")
    out = fa_a2a(*shape, cwd=tmp_path)
    assert "rate bound holds" in out
    assert "capacity bound is broken" in out
    for term in ("a waits of full waves", "b loads", "c drain after the last tile", "d for having touched a peer"):
        assert term in out
    assert main([*shape, "--profile", "paper"]) == 0
    paper = capsys.readouterr().out
    assert "\npaper, st stores" in paper  # it has no other kind
    assert "capacity bound holds" in paper
    for wrong, message in (
        (("--ranks", 8, "--profile", "h200x4"), "h200x4 is for 4 ranks; got 8"),
        (("--ranks", 9), "profiles are shipped for GPUs of one host, at most 8 ranks; got --ranks 9"),
        (("--heads", 3), "as many heads as ranks, got 3 heads over 4 ranks"),
        (("--profile", "h300"), "give a path, or one of"),
        (("--tile-rows", 0), "tile_rows must be at least 1"),
    ):
        assert message in refusal(*shape, *wrong)
