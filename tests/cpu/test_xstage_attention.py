"""The attention audit: the paper's values, the tiles of the shapes measured on 4x H200, and the predicted residuals."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_a2a.errors import ConfigurationError, ProfileError, ShapeError
from fa_a2a.xstage import (
    AttentionAudit,
    AttentionShape,
    audit_attention,
    hidden_fraction,
    load_profile,
    speedup,
)
from fa_a2a.xstage.platform import Capacity

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
H200, PAPER = load_profile("h200x4"), load_profile("paper")


def h200(seq_len: int, num_heads: int, **options: object) -> AttentionAudit:
    return audit_attention(AttentionShape(1, seq_len, num_heads, 128, 4), H200, **options)  # type: ignore[arg-type]


def test_paper_audit() -> None:
    """128 x 128 tiles of bf16 on 148 SMs: both bounds hold, G* = 6.0 us, and 1024 keys are enough."""
    audit = audit_attention(AttentionShape(1, 8192, 32, 128, 8), PAPER, store="st")
    assert audit.volume_bytes == 148 * 32 * 1024
    assert audit.recovery_gap_us == pytest.approx(6.0, abs=0.01)
    assert audit.covering_keys == 1024
    assert audit.bounds.hold
    assert audit.full_wave_wait_us == 0 and audit.terms.wave_wait_us == 0
    assert audit.completion_coupled_us == pytest.approx(2 * 6.764, abs=0.01)
    assert audit.ready_us is None
    assert "rate bound holds" in audit.explain() and "capacity bound holds" in audit.explain()


def test_completion_coupled_grows_with_the_sequence_and_the_residual_does_not() -> None:
    """64 Ki tokens make 8 times the tiles of 8 Ki, hence 14 waves for 2 (2048 and 256 tiles over 148 SMs)."""
    short = audit_attention(AttentionShape(1, 8192, 32, 128, 8), PAPER, store="st")
    long = audit_attention(AttentionShape(1, 65536, 32, 128, 8), PAPER, store="st")
    assert long.completion_coupled_us == pytest.approx(7 * short.completion_coupled_us)
    assert long.sender_us <= short.volume_bytes / 717e3


# Remote tiles of the last wave with the own chunk last, and tiles and waves, at P = 4 on 132 SMs.
@pytest.mark.parametrize(
    ("seq_len", "num_heads", "tiles", "waves", "last", "remote_last"),
    [(4608, 24, 216, 2, 84, 30), (8192, 24, 384, 3, 120, 24), (8192, 12, 192, 2, 60, 12), (4608, 12, 108, 1, 108, 81)],
)
def test_tiles(seq_len: int, num_heads: int, tiles: int, waves: int, last: int, remote_last: int) -> None:
    audit = h200(seq_len, num_heads, own_chunk="last")
    assert (audit.tiles, len(audit.waves), audit.own_tiles) == (tiles, waves, tiles // 4)
    assert audit.waves[-1] == (last, remote_last)
    assert audit.terms.last_drain_us == pytest.approx(remote_last * 32768 / 354e3)


def test_h200_bounds() -> None:
    """Rate bound from about 1.1K keys; capacity bound broken; a full wave in step: 10.8 us (bulk), 8.2 us (st)."""
    audit = h200(4608, 24)
    assert audit.bounds.rate_holds and not audit.bounds.capacity_holds
    assert 900 < audit.covering_keys <= 1152
    assert audit.gap_us > 4 * audit.volume_bytes / 354e3
    assert audit.full_wave_wait_us == pytest.approx(10.8, abs=1.5)
    assert h200(4608, 24, store="st").full_wave_wait_us == pytest.approx(8.2, abs=1.5)
    assert h200(4608, 12).sender_us == pytest.approx(7.5, abs=0.05)
    assert "capacity bound is broken" in audit.explain()


def test_predicted_against_measured_residuals() -> None:
    """Stock FA4 sm90 on 4x H200, 2026-11-29, us. Two measurements: fused - attention alone (interleaved medians), and
    remote - local stores of the same kernel (paired rounds, another run). Nothing is fitted to these.

    | (S, H)      | predicted | fused - FA (difference) | remote - local (difference) |
    |-------------|-----------|-------------------------|-----------------------------|
    | (4608, 24)  |       7.8 |              9.4 (-1.6) |                  8.9 (-1.1) |
    | (8192, 24)  |      14.1 |             18.9 (-4.8) |                 14.4 (-0.3) |
    | (8192, 12)  |       5.6 |              2.9 (+2.7) |                  3.6 (+2.0) |
    | (16384, 24) |      19.0 |             11.0 (+8.0) |                 6.6 (+12.4) |
    | (32768, 24) |      31.8 |            42.0 (-10.2) |                          -  |

    At 16384 the drift of three full waves (9 us) is not seen: it was measured with fixed gaps, and tiles of 200 us
    differ among themselves by more than a burst takes, so later waves are spread out already. Without drift: 10.0 us.
    """
    predicted = {shape: h200(*shape).sender_us for shape in [(4608, 24), (8192, 24), (8192, 12), (16384, 24)]}
    assert [round(us, 1) for us in predicted.values()] == [7.8, 14.1, 5.6, 19.0]
    assert round(h200(32768, 24).sender_us, 1) == 31.8
    measured = {(4608, 24): 9.4, (8192, 24): 18.9, (8192, 12): 2.9}
    for shape, us in measured.items():
        assert predicted[shape] == pytest.approx(us, abs=5.0)
    assert h200(16384, 24).terms.last_drain_us == pytest.approx(11.0, abs=5.0)
    assert h200(4608, 24).ready_us == pytest.approx(predicted[4608, 24] + 6.0)


def test_capacity_verdict_in_words() -> None:
    def with_capacity(low_mib: float, high_mib: float | None) -> str:
        high = None if high_mib is None else high_mib * 1024**2
        bulk = dataclasses.replace(H200.store("bulk"), capacity=Capacity(low_mib * 1024**2, high))
        profile = dataclasses.replace(H200, stores={"bulk": bulk})
        return audit_attention(AttentionShape(1, 4608, 24, 128, 4), profile).explain()

    assert "capacity bound holds" in with_capacity(5, None)
    assert "capacity bound is undecided: 3.87 MiB outstanding, the path holds at least 1.00 MiB" in with_capacity(
        1, None
    )
    assert "capacity bound is undecided" in with_capacity(1, 4)
    assert "capacity bound is broken" in with_capacity(1, 2)


def test_short_sequences_break_the_rate_bound_and_pay_for_it() -> None:
    audit = audit_attention(AttentionShape(1, 512, 1024, 128, 4), H200)
    assert not audit.bounds.rate_holds and "rate bound is broken" in audit.explain()
    full_waves = sum(remote == 132 for _, remote in audit.waves)
    assert audit.terms.drift_us > (full_waves - 1) * (audit.recovery_gap_us - audit.gap_us)


def test_batch_is_one_launch_after_another() -> None:
    one, three = h200(8192, 24), audit_attention(AttentionShape(3, 8192, 24, 128, 4), H200)
    assert three.sender_us == pytest.approx(3 * one.sender_us)
    assert three.terms == one.terms


def test_a_rank_alone_pays_nothing() -> None:
    alone = audit_attention(AttentionShape(1, 8192, 24, 128, 1), dataclasses.replace(H200, num_ranks=1))
    assert alone.remote_tiles == 0 and alone.sender_us == 0


def test_bad_input() -> None:
    with pytest.raises(ProfileError, match="is for 4 ranks; got 2"):
        audit_attention(AttentionShape(1, 4608, 24, 128, 2), H200)
    with pytest.raises(ProfileError, match="store kind 'bulk'"):
        audit_attention(AttentionShape(1, 8192, 32, 128, 8), PAPER)
    with pytest.raises(ShapeError, match="30 heads over 4 ranks"):
        AttentionShape(1, 4608, 30, 128, 4)
    with pytest.raises(ShapeError, match="seq_len must be at least 1"):
        AttentionShape(1, 0, 24, 128, 4)
    with pytest.raises(ConfigurationError, match="own_chunk"):
        h200(4608, 24, own_chunk="middle")


shapes = st.builds(
    AttentionShape,
    batch=st.just(1),
    seq_len=st.integers(1, 70000),
    num_heads=st.integers(1, 16).map(lambda h: 4 * h),
    head_dim=st.sampled_from([64, 96, 128]),
    num_ranks=st.just(4),
    tile_rows=st.sampled_from([64, 128, 192, 256]),
    key_tile=st.sampled_from([64, 128, 176]),
)


@given(shapes, st.sampled_from(["first", "last"]), st.sampled_from(["st", "bulk"]))
def test_audit_properties(shape: AttentionShape, own_chunk: str, store: str) -> None:
    audit = audit_attention(shape, H200, own_chunk=own_chunk, store=store)  # type: ignore[arg-type]
    assert audit.tiles == 4 * shape.chunk_tiles and audit.own_tiles == shape.chunk_tiles
    assert all(tiles == 132 for tiles, _ in audit.waves[:-1]) and 0 < audit.waves[-1][0] <= 132
    assert all(0 <= remote <= tiles for tiles, remote in audit.waves)
    assert audit.bounds.rate_holds == (audit.gap_us >= audit.recovery_gap_us) or audit.gap_us == pytest.approx(
        audit.recovery_gap_us
    )
    if shape.seq_len >= audit.covering_keys:
        assert audit.bounds.rate_holds
    assert audit.terms.wave_wait_us <= audit.full_wave_wait_us
    assert 0 <= audit.terms.total_us == audit.sender_us
    assert audit.ready_us is not None and audit.ready_us >= audit.sender_us
    assert audit.explain().count("\n") == 6


# Table 3 of the paper; its FA3 rows run at Hopper speed. A hidden rate of None was printed as about 100 %, above 1.
PUBLISHED = [json.loads(text) for text in (RESULTS / "paper_table3.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['kernel']}-{row['seq_len']}")
def test_paper_table_3(row) -> None:
    """Speed-ups to 0.001; hidden rates are printed in whole per cent, so to half of one."""
    serial, fused, attention = (row[f"{name}_us"] for name in ("serial", "fused_sender", "fa_only"))
    assert speedup(serial_us=serial, fused_us=fused) == pytest.approx(row["speedup_sender"], abs=0.001)
    hidden = hidden_fraction(serial_us=serial, fused_us=fused, attention_us=attention)
    if row["hidden_fraction"] is None:
        assert 1.0 <= hidden < 1.05
    else:
        assert hidden == pytest.approx(row["hidden_fraction"], abs=0.005)


def test_paper_residuals_of_fa4() -> None:
    residuals = [row["fused_sender_us"] - row["fa_only_us"] for row in PUBLISHED if row["kernel"] == "fa4"]
    assert residuals == pytest.approx([14.0, 10.1, -10.2, 0.7, 8.2], abs=0.05)


@pytest.mark.parametrize(("serial", "fused"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_bad_speedup(serial: float, fused: float) -> None:
    with pytest.raises(ConfigurationError, match="finite and positive"):
        speedup(serial_us=serial, fused_us=fused)


def test_nothing_to_hide() -> None:
    with pytest.raises(ConfigurationError, match="serial must be above attention alone"):
        hidden_fraction(serial_us=100.0, fused_us=90.0, attention_us=100.0)
