"""What `fa-a2a audit` answers with: which profile and which rows are taken, and whether the exchange shows. Torch is
imported for the exchange before attention alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, ShapeError
from ..sharding import even_split
from ..xstage import (
    CostPrediction,
    PlatformProfile,
    available_profiles,
    load_profile,
    nearest_profile,
    predict_cost,
    shipped_profile,
)
from ..xstage.burst_gap import drain_us
from ..xstage.convergence import OF_ATTENTION
from ..xstage.overlap import SHARE

if TYPE_CHECKING:
    from ..xstage.shape import AttentionShape

DEFAULT_RANKS = 4
MOST_RANKS = 8
USUAL_ROWS = 128
MOST_TILES = 2_000_000
HIDDEN = 0.95  # of the exchange, from which on it is called hidden


def profile_and_note(name: str | None, ranks: int | None, gpu: str | None) -> tuple[PlatformProfile, str, bool]:
    """The profile asked for, or the shipped one of this GPU for so many ranks, or, where there is none, the nearest one
    taken for them; a sentence that says which, and what was assumed; and whether anything was."""
    if ranks is not None and ranks < 2:
        raise ConfigurationError(f"one rank has nothing to exchange: --ranks must be at least 2, got {ranks}")
    if name is not None:
        profile = load_profile(name)
        profile.check_fits(num_ranks=profile.num_ranks if ranks is None else ranks, device=gpu)
        return profile, f"profile {_origin(profile)}", False
    count = DEFAULT_RANKS if ranks is None else ranks
    asked = "" if ranks is not None else f"; {count} ranks for lack of --ranks"
    if exact := shipped_profile(count, gpu):
        return exact, f"profile {_origin(exact)}{asked}", False
    if count > MOST_RANKS:
        rule = f"profiles are shipped for GPUs of one host, at most {MOST_RANKS} ranks"
        raise ConfigurationError(f"{rule}; got --ranks {count}; name a profile for so many with --profile")
    near = nearest_profile(count, gpu)
    if near is None:
        known = sorted({load_profile(p).device for p in available_profiles()})
        way_out = "calibrate it with fa-a2a calibrate and name the profile with --profile"
        raise ConfigurationError(f"profiles are shipped for {', '.join(known)}; got --gpu {gpu}; {way_out}")
    taken = dataclasses.replace(near, name=f"{near.name} for {count}", num_ranks=count)
    return taken, _assumption(near, count), True


def _origin(profile: PlatformProfile) -> str:
    return f"{profile.name}: {profile.device}, {profile.num_ranks} ranks, {profile.date}"


def _assumption(near: PlatformProfile, ranks: int) -> str:
    rates = [p for p in map(load_profile, available_profiles()) if p.device == near.device]
    known = ", ".join(f"{p.rate_gb_s:.0f} GB/s with {p.num_ranks}" for p in sorted(rates, key=lambda p: p.num_ranks))
    return (
        f"profile {_origin(near)}, TAKEN FOR {ranks} ranks, for which none is shipped. Assumed: each rank's stores "
        f"drain as fast as with {near.num_ranks} ranks (measured: {known}), every GPU reaches every other one "
        "directly, and telling the peers takes as long. fa-a2a calibrate measures it"
    )


def even_heads(heads: int, seq_len: int, ranks: int) -> tuple[int, list[str]]:
    """Heads of all ranks as if each had as many as the one with most, and what a person should know of the shards.
    ShapeError for fewer heads or tokens than ranks, as the library has it."""
    for what, count in (("heads", heads), ("tokens", seq_len)):
        if 0 < count < ranks:
            raise ShapeError(f"there must be as many {what} as ranks, got {count} {what} over {ranks} ranks; use fewer")
    notes = []
    if heads > 0 and heads % ranks:
        most = even_split(heads, ranks)[0]
        notes.append(f"{heads} heads over {ranks} ranks: {most} or {most - 1} each; predicted for {most}, the slowest")
        heads = most * ranks
    if seq_len > 0 and seq_len % ranks:
        most = even_split(seq_len, ranks)[0]
        notes.append(f"{seq_len} tokens over {ranks} ranks: shards of {most} or {most - 1}; predicted for {most}")
    return heads, notes


def check_tiles(seq_len: int, heads: int, tile_rows: int | None) -> None:
    """ConfigurationError for more tiles than the model, which goes through them one by one, has done in half a minute.
    What is no shape at all is left to AttentionShape."""
    rows = tile_rows if tile_rows is not None and tile_rows > 0 else USUAL_ROWS
    tiles = -(-seq_len // rows) * heads
    if tiles > MOST_TILES:
        raise ConfigurationError(
            f"the model goes through the tiles one by one, at most {MOST_TILES}; got {tiles:.3g} of {rows} rows; "
            "use fewer tokens or heads: longer sequences hide more"
        )


def verdict(cost: CostPrediction) -> str:
    """Is the exchange after attention hidden? In one sentence, with what it would take behind attention."""
    shape, profile, audit = cost.audit.shape, cost.audit.profile, cost.audit
    if not audit.remote_tiles:
        return "one rank has nothing to exchange"
    attention_us = shape.batch * len(audit.waves) * audit.gap_us
    volume_bytes = shape.batch * audit.remote_tiles * shape.tile_bytes
    behind_us = drain_us(volume_bytes=volume_bytes, rate_gb_s=profile.rate_gb_s)
    hidden = max(0.0, 1 - cost.sender_us / behind_us)
    if hidden >= HIDDEN or cost.sender_us <= OF_ATTENTION * attention_us:
        word = "HIDDEN"
    else:
        word = f"HIDDEN BY {100 * hidden:.0f} %" if hidden >= 0.5 else "NOT HIDDEN"
    ready = ""
    if cost.ready_us is not None:
        ready = f", {cost.ready_us:.1f} us ({_share(cost.ready_us, attention_us)}) until every tile has arrived"
    return (
        f"the exchange after attention is {word}: {cost.sender_us:.1f} us ({_share(cost.sender_us, attention_us)}) "
        f"show at the kernel's end{ready}, beside about {attention_us:.0f} us of attention; behind it, its "
        f"{volume_bytes / 1e6:.1f} MB would take {behind_us:.0f} us at the path's rate"
    )


def _share(us: float, of_us: float) -> str:
    return f"{100 * us / of_us:.1f} %"


def slower_path(cost: CostPrediction) -> str:
    """The same at half the rate: what an assumed profile's mistake would do."""
    profile = cost.audit.profile
    half = dataclasses.replace(profile, rate_gb_s=profile.rate_gb_s / 2, rate_range_gb_s=None)
    found = predict_cost(cost.audit.shape, half, cost.design, store=cost.audit.store)
    return f"were the path half as fast, {half.rate_gb_s:.0f} GB/s, {found.sender_us:.1f} us would show"


def before(shape: AttentionShape, profile: PlatformProfile, equal_heads: bool) -> str:
    """The exchange before attention, of q, k and v: overlapped where the library can, else in front. Empty for a GPU
    that the library does not decide for by a profile of its own."""
    from ..layout import ExchangeShape
    from ..ops import overlap_schedule as overlap
    from ..ops.pace import PROFILES

    base = load_profile(PROFILES[overlap.ARCH])
    if shape.num_ranks < 2 or profile.device != base.device:
        return ""
    equal = equal_heads and shape.seq_len % shape.num_ranks == 0
    fits = shape.batch == 1 and shape.head_dim == overlap.HEAD_DIM and shape.num_ranks <= overlap.MAX_RANKS
    if not (equal and fits):
        rule = f"batch 1, head_dim {overlap.HEAD_DIM}, equal shards and heads, and at most {overlap.MAX_RANKS} ranks"
        return f"the exchange before attention comes in front of it: overlapping it is for {rule}"
    call = ExchangeShape(1, shape.seq_len, shape.num_heads, shape.head_dim, shape.num_ranks, shape.bytes_per_element)
    chosen = overlap.schedule(call, overlap.TILE_ROWS, profile.num_sms)
    found = overlap.prediction(call, overlap.TILE_ROWS, profile.num_sms, chosen)
    front_us = found.sends_us * SHARE + overlap.LAUNCH_US
    taken = "overlapped" if found.exposed_us + overlap.MARGIN_US < front_us else "in front"
    return (
        f"the exchange before attention: {front_us:.0f} us in front of it, or overlapped, when "
        f"{max(0.0, found.exposed_us):.0f} us of it show; auto, which goes by {base.name}, takes it {taken}"
    )
