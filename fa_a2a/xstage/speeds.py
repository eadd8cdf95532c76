"""How fast the attention kernels are beside each other, measured: what `auto` compares before stores are counted.

A kernel's speed is the rate of all SMs together while every one is busy (tiles.attention_us), with local stores, at a
head_dim. fa4's is the median over the shapes that were measured; another kernel's is fa4's times the median of the
ratios that were paired round by round, so that the drift of the clocks is in none of them. `scatter` is how far the
ratio of a single shape lies from that median, at most: what is closer than that, the table does not know.

A prediction's attention goes by the platform's profile at PROFILE_HEAD_DIM, and at other head_dims, which have other
rates (64 has 0.83 of it), by this table: `rate_for`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from ..errors import ProfileError
from .designs import KernelDesign, design_of
from .platform import AttentionSpeed, PlatformProfile
from .shape import AttentionShape
from .tiles import attention_us

FORM = "fused"  # the build of a line whose kernel stored its tiles chunk by chunk, as in a fused call
PROFILE_HEAD_DIM = 128  # at which profiles have attention's speed: fa-a2a calibrate measures it there
_REFERENCE = "fa4"
_CAPABILITIES = {"NVIDIA H200": (9, 0)}  # of the devices that a table is shipped for


class Speed(NamedTuple):
    tflops: float
    scatter: float  # of its ratio to fa4, as part of it


class AttentionRate(NamedTuple):
    """What a prediction takes attention's time from. head_dim: at which it was measured, the shape's or another."""

    speed: AttentionSpeed
    head_dim: int
    words: str


def rate_for(profile: PlatformProfile, kernel: str, head_dim: int) -> AttentionRate:
    """The rate that is known for this head_dim: the profile's, or the kernel's as measured on the profile's device;
    where none is, the profile's, which its words then say."""
    if head_dim != PROFILE_HEAD_DIM and (found := shipped_speeds(profile.device).get((kernel, head_dim))):
        speed = AttentionSpeed(tflops=found.tflops)
        return AttentionRate(speed, head_dim, f"{speed}, measured of {kernel} at head_dim {head_dim}")
    words = f"{profile.attention}, the profile's at head_dim {PROFILE_HEAD_DIM}"
    if head_dim != PROFILE_HEAD_DIM:
        words += f", TAKEN FOR {head_dim}, for which none of {kernel} is known on {profile.device}"
    return AttentionRate(profile.attention, PROFILE_HEAD_DIM, words)


@lru_cache(maxsize=8)
def shipped_speeds(device: str) -> Mapping[tuple[str, int], Speed]:
    """By (kernel, head_dim), of this GPU; empty where nothing was measured."""
    for entry in resources.files("fa_a2a.xstage").joinpath("speeds").iterdir():
        if entry.name.endswith(".json"):
            table = json.loads(entry.read_text("utf-8"))
            if table["device"].casefold() == device.strip().casefold():
                return {(x["kernel"], x["head_dim"]): Speed(x["tflops"], x["scatter"]) for x in table["speeds"]}
    return {}


def alone_us(shape: AttentionShape, kernel: KernelDesign, speed: Speed, num_sms: int) -> float:
    """A call's attention with all stores local."""
    return attention_us(shape, tflops=speed.tflops, num_sms=num_sms, tile_speed=kernel.tile_speed(shape))


def table(lines: Iterable[Mapping[str, Any]], device: str, num_sms: int) -> dict[str, Any]:
    """The shipped form, from lines of `fa-a2a kernel` of this device. ProfileError where there are none."""
    found = [x for x in lines if x["kind"] == "kernel" and x["device"] == device and x["build"] == FORM]
    if not found:
        raise ProfileError(f"no line of `fa-a2a kernel` on {device!r} is of the form {FORM!r}; measure it there")
    speeds = []
    for head_dim in sorted({x["head_dim"] for x in found}):
        by_kernel: dict[str, dict[tuple[int, int], Mapping[str, Any]]] = {}
        for x in found:
            if x["head_dim"] == head_dim:
                by_kernel.setdefault(x["kernel"], {})[x["seq_len"], x["local_heads"]] = x
        theirs = by_kernel.pop(_REFERENCE)
        law = {place: _at_one(x, num_sms) for place, x in theirs.items()}
        tflops = statistics.median(law[place] / x["us"] for place, x in theirs.items())
        speeds.append({"kernel": _REFERENCE, "head_dim": head_dim, "tflops": round(tflops, 1), "scatter": 0.0})
        for kernel, ours in sorted(by_kernel.items()):
            ratios = [x["vs_fa4"] * _at_one(x, num_sms) / law[place] for place, x in ours.items()]
            middle = statistics.median(ratios)
            scatter = max(abs(ratio / middle - 1) for ratio in ratios)
            entry = {"kernel": kernel, "head_dim": head_dim, "tflops": round(tflops * middle, 1)}
            speeds.append(entry | {"scatter": round(scatter, 4)})
    dates = sorted(x["date"] for x in found)
    code = ", ".join(sorted({f"{x['kernel']} {x['content_hash']}" for x in found}))
    source = f"fa-a2a kernel, form {FORM!r}, local stores, {dates[0]} to {dates[-1]}, code {code}"
    return {"device": device, "source": source, "speeds": speeds}


def _at_one(line: Mapping[str, Any], num_sms: int) -> float:
    """Time of the line's attention by the law, at 1 TFLOP/s, with the tile that it was measured with. Lines that do not
    name it are from before fa4 chose, which took its first."""
    kernel = design_of(line["kernel"], _CAPABILITIES[line["device"]])
    assert kernel is not None
    shape = kernel.shape(
        batch=line["batch"],
        seq_len=line["seq_len"],
        num_heads=line["local_heads"] * line["chunks"],
        head_dim=line["head_dim"],
        num_ranks=line["chunks"],
        num_sms=num_sms,
    )
    rows, keys = shape.tile_rows, shape.key_tile
    if "tile" in line:
        rows, keys = map(int, line["tile"].split("x"))
    elif line["kernel"] == _REFERENCE:
        rows, keys = kernel.tiles[line["head_dim"]]
    shape = dataclasses.replace(shape, tile_rows=rows, key_tile=keys)
    return alone_us(shape, kernel, Speed(1.0, 0.0), num_sms)
