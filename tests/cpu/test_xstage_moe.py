"""MegaMoE's schedules: Algorithm 1 as written, Table 2's rows, and in simulation the floor and the knee of the lead."""

import statistics
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_a2a.errors import ConfigurationError
from fa_a2a.xstage.moe import MoeTimes, Streams, Tile, from_spans, interleaved, knee_lead, waves
from fa_a2a.xstage.moe_run import simulate_moe

# Table 2 of the paper, us: span wave / interleaved, main loops L2 / L1, predicted stall wave
TABLE_2 = {
    "DiT-MoE": (9.93, 3.77, 5.30, 9.77, 4.63),
    "Qwen3.5": (9.17, 3.82, 4.24, 14.40, 4.94),
    "Hy3": (9.68, 3.59, 6.09, 10.79, 3.60),
    "MiMo-V2.5": (9.22, 3.94, 7.77, 7.57, 1.45),
    "GLM-5.2": (9.53, 3.63, 7.99, 18.77, 1.54),
    "DSv4-Flash": (9.48, 3.83, 8.01, 7.40, 1.47),
    "DSv4-Pro": (7.88, 3.55, 9.54, 11.57, 0.0),
}
INSTANCES = 74  # pairs of 148 SMs
L2_PAIRS = 14


def times(model):
    wave, floor, l2, l1, _ = TABLE_2[model]
    return from_spans(wave_span_us=wave, floor_us=floor, l1_us=l1, l2_us=l2)


def streams(model, rows_each=20):
    """Eight experts; as many Linear-1 pairs in a row as the assumed tile ratio gives."""
    return Streams((rows_each,) * 8, max(1, round(L2_PAIRS * times(model).tile_ratio)), L2_PAIRS)


@lru_cache(maxsize=64)
def ran(model, schedule, lead=1):
    whole = streams(model)
    return simulate_moe(whole, times(model), instances=INSTANCES, schedule=schedule, lead=lead, wave_rows=whole.rows)


@pytest.mark.parametrize("model", TABLE_2)
def test_table_2_stalls(model):
    found = times(model)
    assert found.span_us("waves") == pytest.approx(TABLE_2[model][0])
    assert found.stall_us("waves") == pytest.approx(TABLE_2[model][-1], abs=0.011)
    assert found.stall_us("interleaved") == 0
    assert found.recovers and found.span_us("interleaved") == TABLE_2[model][1]


@pytest.mark.parametrize("model", TABLE_2)
def test_in_simulation_interleaving_reaches_the_floor(model):
    """And the waves' spans come to V/R - T_L2 once the first tiles have filled the path (8 of 31)."""
    wave, floor, *_ = TABLE_2[model]
    late = [span for number, span in ran(model, "waves").spans_us if 8 <= number < 24]
    assert statistics.median(late) == pytest.approx(wave, abs=0.1)
    knee = knee_lead(tile_columns=1, num_sms=2 * INSTANCES, inter_features=streams(model).l1_pairs)
    run = ran(model, "interleaved", knee + 2)
    assert run.median_span_us() == pytest.approx(floor, abs=0.01)
    assert run.end_us < ran(model, "waves").end_us


@pytest.mark.parametrize("model", ["DiT-MoE", "Qwen3.5", "MiMo-V2.5", "DSv4-Pro"])
def test_a_lead_below_the_knee_starves(model):
    """An instance's wait for Linear-1: near nothing two rows above the knee, more than ten times that with a lead of
    1, where the layer takes more than twice as long. Beyond the knee nothing is gained."""
    whole = streams(model)
    knee = knee_lead(tile_columns=1, num_sms=2 * INSTANCES, inter_features=whole.l1_pairs)
    assert knee == -(-INSTANCES // whole.l1_pairs)  # rows that one stride of all instances touches
    low, enough, more = (ran(model, "interleaved", lead) for lead in (1, knee + 2, 2 * knee + 4))
    assert enough.total_starved_us < 6.0 * INSTANCES
    assert low.total_starved_us > 10 * enough.total_starved_us
    assert low.end_us > 2 * enough.end_us
    assert more.end_us == pytest.approx(enough.end_us, rel=0.02)


def test_knee_of_the_paper():
    """b_n * K / (2 h_inter), rounded up, free of rates."""
    assert knee_lead(tile_columns=128, num_sms=148, inter_features=1536) == 7
    assert knee_lead(tile_columns=128, num_sms=148, inter_features=2048) == 5
    assert knee_lead(tile_columns=256, num_sms=2, inter_features=256) == 1


def test_when_interleaving_does_not_suffice():
    """Burst of 30 us, main loops of 5: the gap cancels one for one, and 8.8 us above the floor stay."""
    few = MoeTimes(l1_us=5.0, l2_us=5.0, drain_us=30.0, floor_us=3.0, tile_ratio=1.64)
    assert not few.recovers
    assert few.span_us("waves") == 25.0 and few.span_us("interleaved") == pytest.approx(16.8)
    assert few.stall_us("waves") == 20.0 and few.stall_us("interleaved") == pytest.approx(11.8)


def test_the_assumed_tile_ratio():
    """hidden 4096, h_inter 1536: Linear-1's loop is 4096 / 1536 as long, and 2 * 1536 / 4096 as many tiles come."""
    found = from_spans(wave_span_us=9.0, floor_us=3.0, l1_us=8.0, l2_us=3.0)
    assert found.tile_ratio == pytest.approx(2 * 1536 / 4096)
    assert from_spans(wave_span_us=9.0, floor_us=3.0, l1_us=8.0, l2_us=3.0, tile_ratio=1.0).tile_ratio == 1.0


def test_algorithm_1_by_hand():
    """One instance, rows of one pair each, lead 2: Linear-1 of rows 0 to 2, then in turn, then the rest of Linear-2."""
    walk = interleaved(Streams((2, 2), 1, 1), instance=0, role=1, instances=1, lead=2)
    order = [(tile.layer, tile.expert, tile.m) for tile in walk]
    assert order == [
        *[("L1", 0, 0), ("L1", 0, 1)],
        *[("L2", 0, 0), ("L1", 1, 0)],
        *[("L2", 0, 1), ("L1", 1, 1)],
        *[("L2", 1, 0), ("L2", 1, 1)],
    ]


some_streams = st.builds(
    Streams,
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any).map(tuple),
    st.integers(1, 6),
    st.integers(1, 6),
)


@given(some_streams, st.integers(1, 9), st.integers(1, 8), st.integers(1, 12))
def test_both_schedules_take_every_tile_once(whole, instances, lead, wave_rows):
    """By all instances and both roles; and no Linear-2 tile comes before its own walk's Linear-1 of that row."""
    want = {
        (layer, row, n)
        for layer, p in (("L1", whole.l1_pairs), ("L2", whole.l2_pairs))
        for row in range(whole.rows)
        for n in range(2 * p)
    }
    for schedule, how in ((interleaved, {"lead": lead}), (waves, {"wave_rows": wave_rows})):
        got: list[Tile] = []
        for instance in range(instances):
            for role in (0, 1):
                walk = list(schedule(whole, instance=instance, role=role, instances=instances, **how))
                for i, tile in enumerate(walk):
                    if tile.layer == "L2":
                        assert not any(t.layer == "L1" and t.row <= tile.row for t in walk[i:])
                got += walk
        assert len(got) == len(want)
        assert {(tile.layer, tile.row, tile.n) for tile in got} == want
        assert all(whole.place(tile.row) == (tile.expert, tile.m) for tile in got)


@given(some_streams, st.integers(1, 5))
def test_the_lead_is_kept_while_linear_1_lasts(whole, lead):
    walk = list(interleaved(whole, instance=0, role=0, instances=1, lead=lead))
    last = max(i for i, tile in enumerate(walk) if tile.layer == "L1")
    for i, tile in enumerate(walk[:last]):
        if tile.layer == "L2":
            following = next(t for t in walk[i:] if t.layer == "L1")
            assert following.row >= tile.row + lead


def test_bad_input():
    whole = Streams((2, 2), 2, 2)
    with pytest.raises(ConfigurationError, match="at least 1, or instances wait for each other; got 0"):
        list(interleaved(whole, instance=0, role=0, instances=1, lead=0))
    with pytest.raises(ConfigurationError, match="instance 3 of 2, role 0"):
        list(waves(whole, instance=3, role=0, instances=2, wave_rows=1))
    with pytest.raises(ConfigurationError, match="wave_rows must be at least 1"):
        list(waves(whole, instance=0, role=0, instances=2, wave_rows=0))
    with pytest.raises(ConfigurationError, match="a stream has rows"):
        Streams((0, 0), 1, 1)
    with pytest.raises(ConfigurationError, match="got row 4 beyond"):
        whole.place(4)
    with pytest.raises(ConfigurationError, match="features must be at least 1"):
        knee_lead(tile_columns=128, num_sms=148, inter_features=0)
    with pytest.raises(ConfigurationError, match="instances must be at least 1"):
        simulate_moe(whole, times("Hy3"), instances=0, schedule="waves")
