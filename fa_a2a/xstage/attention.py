"""Audit of attention with the all-to-all inside: does the exchange hide behind the Q-loop, and what remains?

Volumes and bounds follow the paper's audit (arXiv:2607.23264, section 4.3): one output tile per SM is a burst, the
next tile's Q-loop is its gap. The residual is predicted for the stock kernel: one tile per CTA, which leaves when its
store has been accepted, tiles in waves, chunk by chunk. Nothing is fitted to a shape. With waves one Q-loop apart:

- The first wave with remote tiles stores in step and waits as an isolated burst does. An SM that is late stays late,
  so later waves arrive spread out at the path's own rate: the wait is paid once, not once per wave. It counts only
  for the SMs that the last, partial wave uses, and those are the earliest.
- Each further full remote wave costs the profile's `drift_us` (uneven service), and backpressure if the gap is short.
- The kernel ends when its last burst has drained. That runs beside the wait inherited from earlier waves: the
  larger of the two counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import burst_gap as bg
from .platform import PlatformProfile, StoreName
from .shape import AttentionShape, OwnChunk, remote_tiles_per_wave
from .speeds import AttentionRate, rate_for

_MIB = 1024**2


@dataclass(frozen=True)
class ResidualTerms:
    """What the exchange adds to one launch of attention, in us; letters as `fa-a2a audit` prints them."""

    wave_wait_us: float
    """a: wait for the store in the remote wave in step, as far as SMs of the last wave inherit it."""
    drift_us: float
    """a: further full remote waves, out of step, and backpressure where the gap is too short."""
    blocked_load_us: float
    """b: loads queued behind a blocked store. 0 for the stock kernel, whose CTA has no further loads."""
    last_drain_us: float
    """c: the last wave's remote tiles drain after the last tile."""

    @property
    def total_us(self) -> float:
        """Term d, for having touched a peer at all, is nothing (below 0.7 us on 4x H200)."""
        return max(self.wave_wait_us, self.last_drain_us) + self.drift_us + self.blocked_load_us


@dataclass(frozen=True)
class AttentionAudit:
    """Result of audit_attention. Times of one launch (one batch entry) except sender_us and ready_us."""

    shape: AttentionShape
    profile: PlatformProfile
    store: StoreName
    own_chunk: OwnChunk
    rate: AttentionRate
    tile_speed: float
    """What the Q-loop's time is from: a rate, and the share of it that tiles of the shape's form reach."""
    gap_us: float
    """The Q-loop of one tile: G."""
    volume_bytes: int
    """One tile on every SM, all remote: V, the worst alignment."""
    waves: tuple[tuple[int, int], ...]
    """(tiles, remote tiles) of each wave; the last one may be partial."""
    bounds: bg.DesignBounds
    """Against the low end of the capacity's range."""
    recovery_gap_us: float
    """G*: the gap from which periodic bursts are free of backpressure."""
    covering_keys: int
    """M_ub: from this number of keys on, the Q-loop covers G* (upper bound, whole key tiles)."""
    full_wave_wait_us: float
    """Issue time above the floor of a full remote wave in step, by the isolated-burst law."""
    terms: ResidualTerms
    completion_coupled_us: float
    """Counterfactual: every wave, taken as fully remote, exposes its drain: waves * V/R."""

    @property
    def tiles(self) -> int:
        return sum(tiles for tiles, _ in self.waves)

    @property
    def remote_tiles(self) -> int:
        return sum(remote for _, remote in self.waves)

    @property
    def own_tiles(self) -> int:
        return self.tiles - self.remote_tiles

    @property
    def waves_in_words(self) -> str:
        return "one wave" if len(self.waves) == 1 else f"{len(self.waves)} waves"

    @property
    def rate_in_words(self) -> str:
        tiles = f"{self.shape.tile_rows}x{self.shape.key_tile}"
        return self.rate.words + ("" if self.tile_speed == 1 else f"; of it tiles of {tiles} reach {self.tile_speed:g}")

    @property
    def sender_us(self) -> float:
        """Predicted sender-visible residual of the whole call (`batch` launches one after another)."""
        return self.shape.batch * self.terms.total_us

    @property
    def ready_us(self) -> float | None:
        """Predicted residual until the owner may read; None if the profile has no publication time."""
        return None if self.profile.publish_us is None else self.sender_us + self.profile.publish_us

    def explain(self) -> str:
        """The verdict in words: which bound holds, and the predicted residual term by term."""
        s, p, t = self.shape, self.profile, self.terms
        capacity = p.store(self.store).capacity
        peak_bytes = capacity.low_bytes - self.bounds.capacity_margin_bytes
        if self.bounds.capacity_holds:
            verdict = "holds"
        elif capacity.high_bytes is None or peak_bytes <= capacity.high_bytes:
            verdict = "is undecided"
        else:
            verdict = "is broken"
        ready = "unknown (no publication time in the profile)" if self.ready_us is None else f"{self.ready_us:.1f} us"
        return "\n".join(
            [
                f"{p.name}, {self.store} stores: batch {s.batch}, {s.seq_len} tokens, {s.num_heads} heads of "
                f"{s.head_dim}, {s.num_ranks} ranks, tiles of {s.tile_rows} rows",
                f"attention at {self.rate_in_words}",
                f"rate bound {'holds' if self.bounds.rate_holds else 'is broken'}: bursts need a gap of "
                f"{self.recovery_gap_us:.1f} us, the Q-loop gives {self.gap_us:.1f} us "
                f"(covered from {self.covering_keys} keys on)",
                f"capacity bound {verdict}: {peak_bytes / _MIB:.2f} MiB outstanding, the path holds {capacity}; "
                f"a full remote wave in step waits {self.full_wave_wait_us:.1f} us",
                f"{self.tiles} tiles ({self.own_tiles} own, {self.own_chunk}) in {self.waves_in_words}, "
                f"{self.waves[-1][1]} of the last {self.waves[-1][0]} remote",
                f"sender-visible residual {self.sender_us:.1f} us, ready {ready}; per launch the larger of inherited "
                f"wait {t.wave_wait_us:.1f} and last drain {t.last_drain_us:.1f}, plus drift {t.drift_us:.1f} us",
                f"if every wave waited for remote completion: {self.completion_coupled_us:.1f} us per launch",
            ]
        )


def audit_attention(
    shape: AttentionShape,
    profile: PlatformProfile,
    *,
    store: StoreName = "bulk",
    own_chunk: OwnChunk = "first",
    kernel: str = "fa4",
    tile_speed: float = 1.0,
) -> AttentionAudit:
    """Audit one shape on one platform. ProfileError if the profile has another number of ranks or lacks `store`.

    Point predictions use the middle of the capacity's range, the bound its low end. kernel: of the library, whose rate
    of attention is taken where the profile has none for the head_dim. tile_speed: of the shape's tile, as part of it.
    """
    profile.check_fits(num_ranks=shape.num_ranks)
    kind, rate_gb_s, num_sms = profile.store(store), profile.rate_gb_s, profile.num_sms
    floor_us, middle_bytes = kind.issue_us, kind.capacity.middle_bytes
    rate = rate_for(profile, kernel, shape.head_dim)
    full_speed_us = rate.speed.key_tile_us(
        tile_rows=shape.tile_rows, key_tile=shape.key_tile, head_dim=shape.head_dim, num_sms=num_sms
    )
    sigma_us = full_speed_us / tile_speed
    gap_us, volume_bytes = shape.key_tiles * sigma_us, num_sms * shape.tile_bytes
    recovery_us = bg.recovery_gap_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s, floor_us=floor_us)

    def wait_us(tiles: int) -> float:
        burst_bytes = tiles * shape.tile_bytes
        issue_us = bg.isolated_issue_us(
            volume_bytes=burst_bytes, rate_gb_s=rate_gb_s, floor_us=floor_us, capacity_bytes=middle_bytes
        )
        return issue_us - floor_us

    waves = remote_tiles_per_wave(shape, num_sms, own_chunk)
    last_tiles, last_remote = waves[-1]
    # The last wave starts on the SMs that are free first: those with own tiles, then remote tiles as accepted.
    inherited = [min(remote, max(0, last_tiles - (tiles - remote))) for tiles, remote in waves[:-1]]
    first_remote = next((i for i, (_, remote) in enumerate(waves) if remote), len(waves))
    later_full = sum(remote == num_sms for _, remote in waves[first_remote + 1 : -1])
    backpressure_us = bg.backpressure_us(
        volume_bytes=volume_bytes, rate_gb_s=rate_gb_s, floor_us=floor_us, gap_us=gap_us
    )
    terms = ResidualTerms(
        wave_wait_us=max((wait_us(tiles) for tiles in inherited), default=0.0),
        drift_us=later_full * ((kind.drift_us or 0.0) + backpressure_us),
        blocked_load_us=0.0,
        last_drain_us=bg.drain_us(volume_bytes=last_remote * shape.tile_bytes, rate_gb_s=rate_gb_s),
    )
    return AttentionAudit(
        shape=shape,
        profile=profile,
        store=store,
        own_chunk=own_chunk,
        rate=rate,
        tile_speed=tile_speed,
        gap_us=gap_us,
        volume_bytes=volume_bytes,
        waves=waves,
        bounds=bg.design_bounds(
            volume_bytes=volume_bytes,
            rate_gb_s=rate_gb_s,
            floor_us=floor_us,
            gap_us=gap_us,
            capacity_bytes=kind.capacity.low_bytes,
        ),
        recovery_gap_us=recovery_us,
        covering_keys=shape.key_tile * math.ceil(recovery_us / sigma_us),
        full_wave_wait_us=wait_us(num_sms),
        terms=terms,
        completion_coupled_us=len(waves) * bg.drain_us(volume_bytes=volume_bytes, rate_gb_s=rate_gb_s),
    )
