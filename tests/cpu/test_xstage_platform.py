"""Platform profiles: what is shipped, the round trip, and every way to get one wrong."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fa_a2a.errors import FaA2AError, ProfileError
from fa_a2a.xstage import available_profiles, load_profile, save_profile
from fa_a2a.xstage.platform import AttentionSpeed, Capacity
from fa_a2a.xstage.profile_io import profile_from_dict, profile_from_json


def test_shipped_profiles() -> None:
    assert available_profiles() == ["h200x2", "h200x4", "paper"]
    for name in available_profiles():
        assert load_profile(name).name == name
    h200, paper = load_profile("h200x4"), load_profile("paper")
    assert (h200.num_sms, h200.num_ranks, h200.rate_gb_s) == (132, 4, 354.0)
    assert (h200.store("st").issue_us, h200.store("bulk").issue_us) == (0.56, 0.75)
    assert "probe measurements 2026-11-29" in h200.source
    assert (paper.num_sms, paper.rate_gb_s, paper.store("st").issue_us) == (148, 717.0, 0.76)
    assert paper.store("st").capacity.low_bytes == 4.25 * 1024**2


@pytest.mark.parametrize("name", ["h200x2", "h200x4", "paper"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert load_profile(str(tmp_path / "p.json")) == profile
    assert pickle.loads(pickle.dumps(profile)) == copy.deepcopy(profile) == profile


def test_capacity_at_least(tmp_path: Path) -> None:
    data = load_profile("h200x4").to_dict()
    data["stores"]["st"]["capacity"] = {"low_bytes": 2097152, "high_bytes": None}
    profile = profile_from_dict(data)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert profile.store("st").capacity.middle_bytes == 2097152
    assert str(profile.store("st").capacity) == "at least 2.00 MiB"


def test_key_tile_time_scales_with_flops() -> None:
    sigma = AttentionSpeed(sigma_us_per_key_tile=0.79)
    assert sigma.key_tile_us(tile_rows=128, key_tile=128, head_dim=128, num_sms=148) == pytest.approx(0.79)
    assert sigma.key_tile_us(tile_rows=256, key_tile=64, head_dim=64, num_sms=148) == pytest.approx(0.395)
    rate = AttentionSpeed(tflops=4 * 128**3 * 148 / 0.79e6)
    for rows, keys, dim in ((128, 128, 128), (192, 128, 64)):
        tile = {"tile_rows": rows, "key_tile": keys, "head_dim": dim, "num_sms": 148}
        assert rate.key_tile_us(**tile) == pytest.approx(sigma.key_tile_us(**tile))


def _at(*path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


NUMBERS = [
    ("rate_gb_s",),
    ("stores", "bulk", "issue_us"),
    ("stores", "bulk", "capacity", "low_bytes"),
    ("stores", "bulk", "capacity", "high_bytes"),
    ("stores", "bulk", "drift_us"),
    ("stores", "bulk", "blocked_load_us"),
    ("attention", "tflops"),
    ("publish_us",),
    ("num_ranks",),
    ("num_sms",),
]


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "354", True, [], 10**400], ids=lambda v: str(v)[:5])
@pytest.mark.parametrize("path", NUMBERS, ids=".".join)
def test_bad_numbers(path: tuple[str, ...], bad: object) -> None:
    data = load_profile("h200x4").to_dict()
    _at(*path, value=bad)(data)
    with pytest.raises(ProfileError, match=path[-1]):
        profile_from_dict(data)


@pytest.mark.parametrize("path", [p for p in NUMBERS if p[-1] not in ("drift_us", "blocked_load_us", "publish_us")])
def test_zero_is_refused_where_it_has_no_meaning(path: tuple[str, ...]) -> None:
    data = load_profile("h200x4").to_dict()
    _at(*path, value=0)(data)
    with pytest.raises(ProfileError, match=path[-1]):
        profile_from_dict(data)


@pytest.mark.parametrize(
    "path", [*NUMBERS, ("name",), ("device",), ("stores",), ("attention",), ("source",), ("date",)]
)
def test_every_key_is_required(path: tuple[str, ...]) -> None:
    data = load_profile("h200x4").to_dict()
    _without(*path)(data)
    with pytest.raises(ProfileError, match=path[-1]):
        profile_from_dict(data)


@pytest.mark.parametrize("path", [(), ("stores", "bulk"), ("stores", "bulk", "capacity"), ("attention",)])
def test_unknown_keys(path: tuple[str, ...]) -> None:
    data = load_profile("h200x4").to_dict()
    _at(*path, "speed", value=1.0)(data)
    with pytest.raises(ProfileError, match=r"'speed'.*remove or rename"):
        profile_from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_at("name", value=" "), "name must be a non-empty string"),
        (_at("device", value=3), "device must be a non-empty string"),
        (_at("num_sms", value=132.5), "num_sms must be a whole number"),
        (_at("stores", value={}), "stores must name one or more"),
        (_at("stores", value=[]), "stores must be a JSON object"),
        (_at("stores", "tma", value=load_profile("paper").to_dict()["stores"]["st"]), "tma"),
        (_at("stores", "bulk", value=None), "stores.bulk must be a JSON object"),
        (_at("stores", "bulk", "capacity", value=1.0), "capacity must be a JSON object"),
        (_at("stores", "bulk", "capacity", "high_bytes", value=1), "high_bytes must not be below low_bytes"),
        (_at("attention", "sigma_us_per_key_tile", value=0.79), "exactly one of"),
        (_at("attention", value=[1]), "attention must be a JSON object"),
        (_at("attention", "tflops", value=1e-320), "tflops must be from 1e-09 to 1e.18"),
        (_at("stores", "bulk", "issue_us", value=1e308), "issue_us must be from"),
    ],
)
def test_other_mistakes(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = load_profile("h200x4").to_dict()
    change(data)
    with pytest.raises(ProfileError, match=message):
        profile_from_dict(data)


def test_bad_text(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="must be JSON"):
        profile_from_json("{")
    with pytest.raises(ProfileError, match="profile must be a JSON object"):
        profile_from_json("[]")
    with pytest.raises(ProfileError, match=r"may appear once.*name"):
        profile_from_json('{"name": "a", "name": "b"}')
    with pytest.raises(ProfileError, match="must be JSON"):
        profile_from_json("[" * 100_000)
    with pytest.raises(ProfileError, match=r"must be JSON.*4300 digits"):
        profile_from_json(f'{{"num_sms": {"1" * 5000}}}')
    text = json.dumps(load_profile("h200x4").to_dict())
    with pytest.raises(ProfileError, match="rate_gb_s must be finite"):
        profile_from_json(text.replace("354.0", "NaN"))
    with pytest.raises(ProfileError, match="rate_gb_s must be finite"):
        profile_from_json(text.replace("354.0", "1e999"))


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="h200x4"):
        load_profile("h200x5")
    with pytest.raises(ProfileError, match="give a path"):
        load_profile(tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ProfileError, match=r"broken.json.*must hold"):
        load_profile(tmp_path / "broken.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ProfileError, match=r"binary\.json"):
        load_profile(tmp_path / "binary.json")


def test_fits() -> None:
    profile = load_profile("h200x4")
    profile.check_fits(device=" nvidia h200", num_ranks=4)
    profile.check_fits(num_ranks=4)
    with pytest.raises(ProfileError, match=r"is for 'NVIDIA H200'; got 'NVIDIA B200'; calibrate"):
        profile.check_fits(device="NVIDIA B200", num_ranks=4)
    with pytest.raises(ProfileError, match="is for 4 ranks; got 8"):
        profile.check_fits(num_ranks=8)
    with pytest.raises(ProfileError, match="store kind 'bulk'"):
        load_profile("paper").store("bulk")


def test_error_is_one_of_ours_and_a_value_error() -> None:
    with pytest.raises(FaA2AError, match="low_bytes") as caught:
        Capacity(low_bytes=-1.0, high_bytes=None)
    assert isinstance(caught.value, ValueError)
