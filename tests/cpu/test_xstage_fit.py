"""The fit finds again what synthetic samples were made from, and refuses what does not suffice."""

import json

import pytest
from calibration_lines import BLOCKED, CAPACITIES, DRIFT, FLOORS, LOCAL_DONE, MIB, ONE_SENDER, RATE, make

from fa_a2a.bench.fitting import explain
from fa_a2a.errors import ProfileError
from fa_a2a.xstage import load_profile, save_profile
from fa_a2a.xstage.curves import estimate
from fa_a2a.xstage.fit import fit
from fa_a2a.xstage.platform import AttentionSpeed
from fa_a2a.xstage.samples import read_runs

HOW = {"attention": AttentionSpeed(tflops=710.0), "publish_us": None, "source": "synthetic"}


def one(lines):
    (run,) = read_runs(lines)
    return fit(run)


@pytest.mark.parametrize("seed", range(5))
def test_parameters_are_recovered_within_their_ranges(seed):
    found = one(make(seed))
    assert found.rate_gb_s.low <= RATE * 1.002
    assert found.rate_gb_s.high >= RATE * 0.998
    assert found.rate_gb_s.value == pytest.approx(RATE, rel=0.01)
    assert found.one_sender_gb_s is not None
    assert found.one_sender_gb_s.value == pytest.approx(ONE_SENDER, rel=0.01)
    for name, store in found.stores.items():
        assert store.issue_us.value == pytest.approx(FLOORS[name], rel=0.01)
        assert store.issue_us.low <= store.issue_us.value <= store.issue_us.high
        capacity = store.capacity
        assert capacity.low_bytes <= CAPACITIES[name] * 1.05
        assert capacity.high_bytes is not None
        assert capacity.high_bytes >= CAPACITIES[name] * 0.95
        assert capacity.high_bytes - capacity.low_bytes < 0.5 * MIB
        assert store.drift_us == pytest.approx(DRIFT[name], abs=0.2)
        assert store.blocked_load_us == pytest.approx(BLOCKED[name], abs=0.2)
        assert store.paced_us[1, 0.0] == pytest.approx(8, rel=0.05)
        assert store.paced_us[16, 1.0] == pytest.approx(0.4, abs=0.1)
        for law in (store.max_law, store.steady_law, store.coupled_law):
            assert len(law) == 12
            assert max(abs(point.residual) for point in law) < 0.05
        for point in store.completed:
            assert point.done_us - point.local_us == pytest.approx(point.above_local_us, abs=0.8)
            assert point.local_us == pytest.approx(LOCAL_DONE, rel=0.02)


def test_noise_widens_the_ranges():
    quiet, loud = (one(make(3, noise=noise)).rate_gb_s for noise in (0.001, 0.05))
    assert loud.high - loud.low > 3 * (quiet.high - quiet.low)
    assert quiet.low <= RATE <= quiet.high


def test_a_machine_that_breaks_the_law_shows_it():
    """Completion-coupled periods are no max law: the residual says so at the gaps in the middle."""
    lines = make()
    fences = {(x["store"], x["bursts"], x["gap_us"]): x for x in lines if x["experiment"] == "fence"}
    for line in lines:
        if line["experiment"] == "gap" and line["traffic"] == "all_to_all" and line["gap_us"] <= 14:
            line["total_us"] = fences[line["store"], line["bursts"], line["gap_us"]]["total_us"]
    (worst, *_) = sorted((p.residual for p in one(lines).stores["st"].max_law), reverse=True)
    assert worst > 0.5


def test_blocks_out_of_step_break_the_coupled_law_and_released_ones_do_not():
    for store in one(make()).stores.values():
        worst = min(store.free_law, key=lambda point: point.residual)
        assert worst.residual < -0.1
        assert worst.gap_us > 10
        assert max(abs(point.residual) for point in store.coupled_law) < 0.02


def test_a_launch_that_ends_with_few_blocks_is_told_from_a_slow_path():
    lines = [
        line | {"total_us": [us * 1.1 for us in line["total_us"]]}
        if line["experiment"] == "gap" and line["traffic"] == "all_to_all" and line["gap_us"] == 8
        else line
        for line in make()
    ]
    for store in one(lines).stores.values():
        for law, residual in ((store.max_law, 0.1), (store.steady_law, 0.0)):
            assert next(p for p in law if p.gap_us == 8).residual == pytest.approx(residual, abs=0.02)


def test_the_floor_leaves_out_what_the_first_bursts_cost():
    lines = [
        line | {"issue_us": [us + 8 / line["bursts"] for us in line["issue_us"]]}
        if line["experiment"] == "gap"
        else line
        for line in make()
    ]
    for name, store in one(lines).stores.items():
        assert store.issue_us.value == pytest.approx(FLOORS[name], rel=0.02)


def test_older_samples_say_what_they_hold():
    """Without released bursts with a fence, and without the time while all blocks run."""
    lines = [
        {key: value for key, value in line.items() if key != "steady_us"}
        for line in make()
        if line["experiment"] != "fence_released"
    ]
    found = one(lines)
    for store in found.stores.values():
        assert (store.steady_law, store.coupled_law, store.completed) == ((), (), ())
        assert len(store.max_law) == len(store.free_law) == 12
    text = explain(found)
    assert "blocks on their own" in text
    assert "released together" not in text


def test_without_a_knee_the_capacity_is_at_least(tmp_path):
    found = one(make(capacities={"st": 99 * MIB, "bulk": CAPACITIES["bulk"]}))
    st = found.stores["st"].capacity
    assert st.high_bytes is None
    assert st.low_bytes < 132 * 128 * 1024
    assert "Q at least" in explain(found)
    profile = found.profile(name="probe", **HOW)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert profile.versions == {"torch": "2.11.0"}
    assert profile.rate_range_gb_s is not None
    assert profile.stores["bulk"].issue_range_us is not None


def test_a_path_slower_than_its_rate_holds_nothing():
    lines = make()
    for line in lines:
        if line["experiment"] == "isolated" and line["traffic"] == "all_to_all":
            line["slowest_us"] = [line["bytes_per_cta"] * 132 / RATE / 1e3 * 1.2] * 8
    assert one(lines).stores["st"].capacity.low_bytes == 1


def test_runs_are_told_apart_by_their_date():
    runs = read_runs(make(1, date="2026-01-02") + make(2, date="2026-01-01"))
    assert [run.date for run in runs] == ["2026-01-01", "2026-01-02"]
    rates = [fit(run).rate_gb_s.value for run in runs]
    assert max(rates) / min(rates) < 1.01


def test_the_fit_is_the_same_every_time():
    assert one(make()) == one(make())
    assert estimate([3.0]) == estimate([3.0])


def test_the_report_names_every_number():
    text = explain(one(make()))
    for words in (
        *("one rank sending", "T0 0.5", "max(T0 + G, V/R)", "while all blocks run", "released together"),
        *("blocks on their own", "local control 1.2", "32 KiB", "16 slices 1 us apart"),
    ):
        assert words in text


def without(experiment, **equal):
    return [
        line
        for line in make()
        if line["experiment"] != experiment or any(line[name] != value for name, value in equal.items())
    ]


def changed(experiment, **values):
    return [line | values if line["experiment"] == experiment else line for line in make()]


INSUFFICIENT = [
    (list, "lines of kind 'calibrate'.*record some"),
    (lambda: [{"kind": "sweep"}], "lines of kind 'calibrate'"),
    (lambda: without("zero_gap"), "zero-gap samples"),
    (lambda: without("zero_gap", traffic="all_to_all"), "all ranks sending"),
    (lambda: without("gap"), "gap sweep"),
    (lambda: [x for x in make() if x["experiment"] != "gap" or x["gap_us"] <= 12], "past recovery.*longer gaps"),
    (lambda: without("isolated"), "isolated bursts"),
    (lambda: without("isolated", traffic="local"), "local control"),
    (lambda: without("fence_released", traffic="local"), "burst with a fence needs its local control"),
    (lambda: changed("fence_released", done_us=[]), "slowest block.*without done_us"),
    (lambda: without("gap", bursts=40), "two numbers of bursts"),
    (lambda: without("load", traffic="local"), "load needs traffic local"),
    (lambda: without("waves", bursts=1), "launches of one burst"),
    (lambda: changed("isolated", slowest_us=[]), "slowest block"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "message"), INSUFFICIENT, ids=lambda x: x if isinstance(x, str) else "")
def test_insufficient_samples(lines, message):
    with pytest.raises(ProfileError, match=message):
        one(lines())


def with_first(**values):
    lines = make()
    lines[0] = lines[0] | values
    return lines


MALFORMED = [
    ({"device": "NVIDIA B200"}, "one device.*file of its own"),
    ({"world_size": 2}, "one world_size"),
    ({"num_sms": 148}, "one num_sms"),
    ({"total_ms": [1.0]}, "only the fields.*total_ms.*remove or convert"),
    ({"experiment": "warp"}, "experiment must be one of"),
    ({"store": "tma"}, "store must be one of"),
    ({"traffic": "ring"}, "traffic must be one of"),
    ({"bursts": 0}, "bursts must be a whole number"),
    ({"bytes_per_cta": 1.5}, "bytes_per_cta must be a whole number"),
    ({"gap_us": -1.0}, "gap_us must be finite and at least 0"),
    ({"total_us": []}, "total_us must be a list"),
    ({"total_us": 3.0}, "total_us must be a list"),
    ({"total_us": [0.0] * 7}, "total_us must be finite and positive"),
    ({"total_us": [float("nan")] * 7}, "total_us must be finite"),
    ({"total_us": ["1"] * 7}, "total_us must be finite"),
    ({"total_us": [1.0] * 3}, "one entry a round"),
    ({"steady_us": [1.0] * 3}, "steady_us must have one entry a round"),
    ({"total_us": [0.25] * 7}, r"5 to 20000 GB/s.*give total_us in us"),  # in ms
    ({"total_us": [2.5e5] * 7}, r"5 to 20000 GB/s"),  # in ns
]


@pytest.mark.parametrize(("values", "message"), MALFORMED, ids=lambda x: x if isinstance(x, str) else "")
def test_malformed_samples(values, message):
    with pytest.raises(ProfileError, match=message):
        read_runs(with_first(**values))


@pytest.mark.parametrize("key", ["num_sms", "total_us", "slices", "versions", "date"])
def test_every_field_is_required(key):
    lines = make()
    del lines[0][key]
    with pytest.raises(ProfileError, match=key):
        read_runs(lines)


def test_lines_survive_json():
    lines = make()
    assert read_runs(json.loads(json.dumps(lines))) == read_runs(lines)
