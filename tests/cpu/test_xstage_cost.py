"""Costs of our kernels, predicted from profile and shape alone, beside those recorded on 2x and 4x H200."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
from fa4_a2a import forward, persistent
from hypothesis import given
from hypothesis import strategies as st

from fa_a2a.errors import ConfigurationError, ProfileError, UnsupportedError
from fa_a2a.native.build import Variant
from fa_a2a.ops import pace
from fa_a2a.xstage import (
    DESIGNS,
    AttentionShape,
    audit_attention,
    design,
    design_of,
    load_profile,
    predict_cost,
    profile_hash,
    shipped_profile,
)
from fa_a2a.xstage.convergence import TOLERANCE_US, report, verdict
from fa_a2a.xstage.speeds import PROFILE_HEAD_DIM, rate_for, shipped_speeds

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
H200X4, H200X2 = load_profile("h200x4"), load_profile("h200x2")


def predicted(kernel, seq_len, num_heads, profile, **other):
    chosen = design(kernel)
    shape = {"batch": 1, "seq_len": seq_len, "num_heads": num_heads, "head_dim": 128, "num_ranks": profile.num_ranks}
    return predict_cost(chosen.shape(**shape | other), profile, chosen)


def recorded(pattern):
    return [json.loads(text) for path in sorted(RESULTS.glob(pattern)) for text in path.read_text().splitlines()]


def test_recorded_paces():
    """The pace bench on 2x H200: stock, own staging unpaced and paced at R / 2 (3 us behind each of 8 slices)."""
    lines = {(x["variant"], x["order"], x["pace_ns"], x["seq_len"]): x for x in recorded("pace_h200x2.jsonl")}
    for seq_len in (4608, 8192):
        for kernel, key in {
            "stock": ("stock", "first", 0),
            "unpaced": ("warp", "last", 0),
            "persistent": ("warp", "last", 3000),
        }.items():
            line = lines[(*key, seq_len)]
            cost = predicted(kernel, seq_len, 24, H200X2)
            assert abs(cost.sender_us - line["cost_sender_us"]) <= 5.0, (kernel, seq_len)


# On 4x H200, 2026-11-29: a probe of the persistent kernel with a store warp, own chunk last, against local stores;
# without pause and with 3 us between the slices. MEASURED figures of another program, so nothing here can be fitted.
@pytest.mark.parametrize(
    ("seq_len", "num_heads", "unpaced", "paced"),
    [(4608, 24, 11.2, 2.5), (8192, 24, 13.0, 1.0), (8192, 12, 6.8, 0.5), (16384, 24, 11.4, -2.6)],
)
def test_probe_on_four_ranks(seq_len, num_heads, unpaced, paced):
    assert predicted("unpaced", seq_len, num_heads, H200X4).sender_us == pytest.approx(unpaced, abs=5.0)
    assert predicted("persistent", seq_len, num_heads, H200X4).sender_us == pytest.approx(paced, abs=5.0)


def test_publication_of_the_shipped_profile_beside_the_pace_benchs():
    """At (4608, 24) on 2x H200, median over the persistent builds. Calibration publishes behind local stores, the pace
    bench behind remote ones: up to 3.1 us longer, inside the kernel and behind it, which is within the tolerance."""
    lines = [x for x in recorded("pace_h200x2.jsonl") if x["seq_len"] == 4608 and "cost_ready_inside_us" in x]
    for name, field in (("publish_us", "cost_ready_small_us"), ("publish_inside_us", "cost_ready_inside_us")):
        found = statistics.median(x[field] - x["cost_sender_us"] for x in lines)
        assert 0 <= found - getattr(H200X2, name) <= TOLERANCE_US


def test_terms_of_the_persistent_kernel():
    """P = 4: what is left are the remote tiles of the last wave, 30, 24, 12; (4608, 12) is one wave with 81."""
    for seq_len, heads, tiles in [(4608, 24, 30), (8192, 24, 24), (8192, 12, 12), (4608, 12, 81)]:
        cost = predicted("persistent", seq_len, heads, H200X4)
        assert {term.name: term.us for term in cost.terms if term.us} == {
            "last_drain": pytest.approx(tiles * 32768 / 354e3)
        }
        assert cost.ready_us == pytest.approx(cost.sender_us + 3.0)
    words = predicted("persistent", 4608, 24, H200X4).explain()
    assert "30 remote tiles leave behind the end" in words and "a wave leaves in 24.4 us" in words
    assert "sender-visible 2.8 us, ready 5.8 us (publication inside: 3.0)" in words


def test_stock_is_the_audit():
    cost = predicted("stock", 8192, 24, H200X4)
    audit = audit_attention(AttentionShape(1, 8192, 24, 128, 4, key_tile=160), H200X4)
    assert cost.sender_us == audit.sender_us and cost.ready_us == audit.ready_us


def test_rate_of_a_head_dim_is_the_one_measured_for_it_or_says_that_it_is_anothers():
    for kernel, profile in (("fa4", H200X2), ("fa3", H200X4)):
        for head_dim in (64, 96, PROFILE_HEAD_DIM):
            rate, known = rate_for(profile, kernel, head_dim), shipped_speeds(profile.device).get((kernel, head_dim))
            if head_dim == PROFILE_HEAD_DIM or known is None:
                assert (rate.speed, rate.head_dim) == (profile.attention, PROFILE_HEAD_DIM)
            else:
                assert (rate.speed.tflops, rate.head_dim) == (known.tflops, head_dim)
            assert ("TAKEN FOR 96" in rate.words) == (head_dim == 96)
    elsewhere = dataclasses.replace(H200X4, device="NVIDIA B200")
    assert rate_for(elsewhere, "fa4", 64).speed == H200X4.attention
    assert rate_for(elsewhere, "fa4", 64).words.endswith("for which none of fa4 is known on NVIDIA B200")


def test_designs_tile_and_pace_as_the_kernels_do():
    for head_dim, (rows, keys) in design("persistent").tiles.items():
        assert persistent.persistent_tile(head_dim, "sm_90a") == (rows, keys)
        assert forward.forward_tile(head_dim, "sm_90a") == (rows, keys)
        for seq_len in (1024, 4608, 32768):
            cost = predicted("persistent", seq_len, 24, H200X4, head_dim=head_dim)
            runs = cost.audit.shape.tile_rows  # of the tile that such a launch takes
            slices = runs // 16
            pause_ns = pace.slice_pace_ns(runs, seq_len, head_dim, 2, 132, 16)
            assert slices * pause_ns / 1e3 == pytest.approx(cost.leave_us, rel=0.1)  # whole key tiles, whole ns
    for head_dim, tile in design("fa3").tiles.items():
        assert Variant(head_dim, "bfloat16").shape == tile
    assert design_of("fa4", (9, 0)) is design("persistent") and design_of("fa3", (9, 0)) is design("fa3")
    assert design_of("fa4", (10, 0)) is None and design_of("torch", (9, 0)) is None


@pytest.mark.parametrize("name", ["stock", "persistent", "fa3"])
def test_the_q_loop_of_a_slower_tile_is_longer(name):
    """At head_dim 64 this call takes the second tile, (4608, 24) on 4 ranks, and 8192 tokens the first."""
    first, second = design(name).choices[64]
    short, long = (predicted(name, seq_len, 24, H200X4, head_dim=64).audit for seq_len in (4608, 8192))
    assert (short.shape.tile_rows, long.shape.tile_rows) == (second.rows, first.rows)
    per_key = [audit.gap_us / audit.shape.key_tiles for audit in (short, long)]
    assert per_key[0] / per_key[1] == pytest.approx(second.rows / first.rows / second.speed)
    tflops = shipped_speeds("NVIDIA H200")[design(name).kernel, 64].tflops
    assert per_key[1] == pytest.approx(4 * first.rows * first.keys * 64 * 132 / (tflops * 1e6))


def test_batch_entries_are_launches_but_where_one_launch_does_all():
    one, two = (predicted("persistent", 2048, 8, H200X2, batch=batch).sender_us for batch in (1, 2))
    assert two == 2 * one > 0
    once, as_heads = predicted("fa3", 2048, 8, H200X2, batch=2), predicted("fa3", 2048, 16, H200X2)
    assert (once.audit.waves, once.sender_us) == (as_heads.audit.waves, as_heads.sender_us)
    assert once.audit.tiles == 2 * predicted("persistent", 2048, 8, H200X2, batch=2).audit.tiles


def test_shipped_profiles_by_ranks_and_device():
    assert shipped_profile(2, "NVIDIA H200") == H200X2 and shipped_profile(4) == H200X4
    assert shipped_profile(8) is None  # the paper's knows no bulk stores
    assert shipped_profile(2, "NVIDIA B200") is None
    assert profile_hash(H200X2) != profile_hash(H200X4) and len(profile_hash(H200X2)) == 16


def test_bad_input():
    with pytest.raises(ProfileError, match="is for 4 ranks; got 2"):
        predict_cost(AttentionShape(1, 4608, 24, 128, 2), H200X4, design("persistent"))
    with pytest.raises(UnsupportedError, match="for head_dim 128, 64, got 96"):
        predicted("persistent", 4608, 24, H200X4, head_dim=96)
    with pytest.raises(ConfigurationError, match="stock, persistent, unpaced, fa3; got 'fast'"):
        design("fast")


@given(st.integers(1, 70000), st.integers(1, 16), st.sampled_from([64, 128]), st.sampled_from(["h200x2", "h200x4"]))
def test_properties(seq_len, heads, head_dim, name):
    """Pacing never costs more than storing at once; what the stores cost is never more than all of them in a row and
    the uneven service of each full wave."""
    profile = load_profile(name)
    options = {"head_dim": head_dim, "batch": 2}
    costs = {k: predicted(k, seq_len, heads * profile.num_ranks, profile, **options) for k in DESIGNS}
    assert 0 <= costs["persistent"].sender_us <= costs["unpaced"].sender_us
    for cost in costs.values():
        audit = cost.audit
        drain_us = audit.remote_tiles * audit.shape.tile_bytes / profile.rate_gb_s / 1e3
        drift_us = len(audit.waves) * profile.store("bulk").drift_us
        assert cost.sender_us <= 2 * (drain_us + drift_us) + 1e-6
        assert cost.ready_us >= cost.sender_us


def test_verdicts():
    def of(predicted_us, measured_us, ci_us, attention_us=100.0):
        return verdict(predicted_us=predicted_us, measured_us=measured_us, ci_us=ci_us, attention_us=attention_us)

    assert of(0, 4.9, 1) == "agree" and of(0, 5.1, 1) == "apart" and of(0, 5.1, 5.1) == "undecided"
    assert of(0, 4.9, 5.1) == "undecided" and of(0, 4.9, None) == "undecided" and of(0, 10.2, 5.1) == "apart"
    assert of(60, 80, 1) == "agree" and of(50, 80, 1) == "apart"  # 25 %
    assert of(0, 49, 1, attention_us=10000) == "agree"  # 0.5 %


def test_report_warns_where_they_part():
    line = {"world_size": 2, "seq_len": 4608, "num_heads": 24, "kernel": "fa4", "fa_only_us": 220.0}
    line |= {"cost_sender_us": 1.0, "cost_sender_ci_us": 0.5, "predicted_sender_us": 0.0}
    line |= {"cost_ready_us": 14.0, "cost_ready_ci_us": 0.5, "predicted_ready_us": 3.5}
    head, apart, way_out = report([line])
    assert "1 of 2 costs as predicted, 0 undecided" in head and head.endswith("1 apart")
    assert "P=2 S=4608 H=24 fa4: ready cost predicted +3.5, measured +14.0 us (± 0.5; allowed 5.0)" in apart
    assert "calibrate again" in way_out
    assert report([line | {"predicted_ready_us": None}])[0].startswith("X-Stage: 1 of 1 costs as predicted")
    assert report([{"fa_only_us": 1.0}]) == []


def test_report_says_where_the_clock_made_a_cost():
    """65536 tokens on 2 GPUs at their power limit: 2 % more time, as many cycles."""
    line = {"world_size": 2, "seq_len": 65536, "num_heads": 24, "kernel": "fa4", "fa_only_us": 40000.0}
    line |= {"cost_sender_us": 500.0, "cost_sender_ci_us": 60.0, "predicted_sender_us": 0.0}
    unknown = report([line])
    assert len(unknown) == 3 and "calibrate again" in unknown[-1] and "clock" not in unknown[1]
    clock = report([line | {"cost_sender_equal_clock_us": 30.0, "cost_sender_equal_clock_ci_us": 20.0}])
    assert clock[0] == unknown[0], "what was measured was measured"
    assert "at equal clocks +30.0 us (± 20.0)" in clock[1] and "power limit" in clock[2] and len(clock) == 3
    both = report([line | {"cost_sender_equal_clock_us": 400.0, "cost_sender_equal_clock_ci_us": 20.0}])
    assert "at equal clocks +400.0 us" in both[1] and "calibrate again" in both[2] and len(both) == 3


def test_equal_clocks_decide_what_times_do_not():
    line = {"world_size": 2, "seq_len": 65536, "num_heads": 24, "kernel": "fa4", "fa_only_us": 40000.0}
    line |= {"cost_sender_us": 500.0, "cost_sender_ci_us": 600.0, "predicted_sender_us": 0.0}
    assert report([line]) == [
        "X-Stage: 0 of 1 costs as predicted, 1 undecided (the measurement scatters too much), 0 apart"
    ]
    for clock_us, want in (
        (30.0, "1 of 1 costs as predicted (1 at equal clocks), 0"),
        (400.0, "0 of 1 costs as predicted, 0"),
    ):
        fields = {"cost_sender_equal_clock_us": clock_us, "cost_sender_equal_clock_ci_us": 20.0}
        assert report([line | fields])[0].startswith(f"X-Stage: {want} undecided")
    ready = {name.replace("sender", "ready"): value for name, value in line.items()}
    ready |= {"cost_ready_equal_clock_us": 30.0, "cost_ready_equal_clock_ci_us": 20.0}
    assert "1 undecided" in report([ready])[0], "of ranks that wait for each other no one clock tells"
