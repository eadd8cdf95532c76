"""Profiles from and to JSON: no key unknown, missing or repeated; platform.py checks the values."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ProfileError
from .platform import AttentionSpeed, Capacity, PlatformProfile, StoreKind, refuse

if TYPE_CHECKING:  # moved in Python 3.11
    from importlib.abc import Traversable

_PROFILE_KEYS = frozenset(PlatformProfile.__dataclass_fields__)
_STORE_KEYS = frozenset(StoreKind.__dataclass_fields__)
_MAY_LACK = frozenset(
    {"rate_range_gb_s", "versions", "issue_range_us", "publish_inside_us"}
)  # profiles from elsewhere do not say
_CAPACITY_KEYS = frozenset(Capacity.__dataclass_fields__)
_ATTENTION_KEYS = frozenset(AttentionSpeed.__dataclass_fields__)


def _object(where: str, value: object, known: frozenset[str], required: frozenset[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(f"{where} must be a JSON object", value)
    if unknown := sorted(set(value) - known):
        raise refuse(f"{where} may hold only {sorted(known)}", unknown, "remove or rename these keys")
    if missing := sorted(required - set(value)):
        raise refuse(f"{where} must hold {sorted(required)}", sorted(value), f"add {missing}")
    return value


def profile_from_dict(data: object) -> PlatformProfile:
    """A checked profile from JSON values (PlatformProfile.to_dict's form); ProfileError says what is wrong."""
    fields = dict(_object("profile", data, _PROFILE_KEYS, _PROFILE_KEYS - _MAY_LACK))
    if not isinstance(fields["stores"], dict):
        raise refuse("stores must be a JSON object", fields["stores"])
    stores = {}
    for kind, value in fields["stores"].items():
        where = f"stores.{kind}"
        store = dict(_object(where, value, _STORE_KEYS, _STORE_KEYS - _MAY_LACK))
        capacity = _object(f"{where}.capacity", store["capacity"], _CAPACITY_KEYS, _CAPACITY_KEYS)
        stores[kind] = StoreKind(**store | {"capacity": Capacity(**capacity)})
    attention = AttentionSpeed(**_object("attention", fields["attention"], _ATTENTION_KEYS, frozenset()))
    return PlatformProfile(**fields | {"stores": stores, "attention": attention})


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise refuse("each key may appear once", repeated, "remove the repeated keys")
    return dict(pairs)


def profile_from_json(text: str) -> PlatformProfile:
    """A checked profile from JSON text; ProfileError if it is not JSON or not a profile."""
    try:
        data = json.loads(text, object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        if isinstance(error, ProfileError):
            raise
        raise refuse("the text must be JSON", str(error), "repair it, or calibrate again") from None
    return profile_from_dict(data)


def _shipped() -> dict[str, Traversable]:
    entries = resources.files("fa_a2a.xstage").joinpath("profiles").iterdir()
    return {entry.name.removesuffix(".json"): entry for entry in entries if entry.name.endswith(".json")}


def available_profiles() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(_shipped())


def load_profile(source: str | Path) -> PlatformProfile:
    """A shipped profile by name ("h200x4"), or one from the path of a JSON file; ProfileError if it is neither."""
    if isinstance(source, str) and (entry := _shipped().get(source)) is not None:
        return profile_from_json(entry.read_text("utf-8"))
    try:
        text = Path(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(
            f"give a path, or one of {available_profiles()}",
            str(source),
            getattr(error, "strerror", None) or str(error),
        ) from error
    try:
        return profile_from_json(text)
    except ProfileError as error:
        raise ProfileError(f"{source}: {error}") from None


def save_profile(profile: PlatformProfile, path: str | Path) -> None:
    """Write `profile` as JSON; load_profile reads back an equal one."""
    Path(path).write_text(json.dumps(profile.to_dict(), indent=2, allow_nan=False) + "\n", "utf-8")


def profile_hash(profile: PlatformProfile) -> str:
    """Of all its numbers, so that a prediction says which it was made from."""
    return hashlib.sha256(json.dumps(profile.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def _shipped_of(device: str | None) -> list[PlatformProfile]:
    """Of a device, or of any GPU whose bulk stores are known."""
    found = map(load_profile, available_profiles())
    if device is None:
        return [profile for profile in found if "bulk" in profile.stores]
    return [profile for profile in found if profile.device.casefold() == device.strip().casefold()]


@lru_cache(maxsize=64)
def shipped_profile(num_ranks: int, device: str | None = None) -> PlatformProfile | None:
    """The shipped profile for this many ranks of this device, or None. device None: of any GPU whose bulk stores are
    known, for a preview on a machine that has none."""
    return next((profile for profile in _shipped_of(device) if profile.num_ranks == num_ranks), None)


def nearest_profile(num_ranks: int, device: str | None = None) -> PlatformProfile | None:
    """The shipped profile to take where there is none for this many ranks: of the next larger number of them, whose
    path is no faster, else of the largest. None for a device without any. It keeps its own number of ranks."""
    found = sorted(_shipped_of(device), key=lambda profile: profile.num_ranks)
    larger = [profile for profile in found if profile.num_ranks >= num_ranks]
    return larger[0] if larger else found[-1] if found else None
