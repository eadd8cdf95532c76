"""What a fused kernel's remote stores cost, term by term, from its design, the shape and the platform's profile alone.

Cost: the time of the kernel with its stores to the peers, less that of the same kernel with all stores local. `stock`
is attention.py's audit. For a kernel with staging of its own, whose blocks stay:

- Waves of tiles lie one Q-loop apart. A tile leaves during the next Q-loop: paced in min(headroom * V/R, half of the
  Q-loop), or at once.
- What leaves faster than the path drains piles up beyond its capacity, and the next tile's loads wait behind it: the
  isolated-burst law with the leaving time as floor, at most the profile's `blocked_load_us`. Paid once, by the first
  wave, since a block that is late stays late; further full waves cost `drift_us`, as in the stock audit. Paced stores
  at R / headroom pay neither.
- Backpressure [V/R - T0 - G]+ for each wave whose Q-loop is shorter than the drain, whatever the pace.
- The last wave's remote tiles leave at once and drain after the kernel's computation: V/R of them. With the own chunk
  last there are none once the own tiles fill that wave.
- Publication comes on top of that for the ready time.

No terms for these:

- Each call waits for the rank that is slowest in it. The calls of one H200, taken for ranks that go on their own, would
  wait 0.6 us or 0.1 % of a call (8 ranks: 0.3 %) for each other (tests/cpu/test_predicted_measured.py). Two H200s at
  their power limit change their clocks each by itself: in SM cycles, ready lies -0.1 +- 0.6 us above sender-visible and
  publication at 4608 tokens of 24 heads, 2.8 +- 0.9 at 8192, 5 +- 4 at 16384, up to 0.5 % of a call (fa4's lines of
  sweep_h200x2.jsonl, means of the rounds).
- The clock. Under attention of some milliseconds an H200 is at its power limit, at 1200 to 1600 MHz, and moves from
  round to round: at 65536 tokens of 24 heads remote stores took 203 +- 586 us more of 41 ms than local ones, in cycles
  1 +- 84 us (sweep_h200x2.jsonl). There is no telling from such times whether they draw power of their own; the path
  moves 2.4 GB/s then.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import burst_gap as bg
from .attention import AttentionAudit, audit_attention
from .designs import KernelDesign
from .platform import PlatformProfile, StoreName
from .shape import AttentionShape


@dataclass(frozen=True)
class CostTerm:
    """A part of one launch's cost."""

    name: str
    us: float
    words: str


@dataclass(frozen=True)
class CostPrediction:
    """Result of predict_cost. The sum of `terms` is one launch's cost; a call launches once for each batch entry."""

    design: KernelDesign
    audit: AttentionAudit
    leave_us: float
    """Time in which a wave's tiles leave their staging; 0 where each is stored at once."""
    terms: tuple[CostTerm, ...]
    publish_us: float | None

    @property
    def sender_us(self) -> float:
        """Until the kernel has ended."""
        return self.audit.shape.batch * sum(term.us for term in self.terms)

    @property
    def ready_us(self) -> float | None:
        """Until every owner may read; None if the profile has no publication time of this kind."""
        return None if self.publish_us is None else self.sender_us + self.publish_us

    def explain(self) -> str:
        """Each term that costs something in words, then the sums."""
        shown = [term for term in self.terms if term.us >= 0.05]
        audit, publish = self.audit, self.publish_us
        shape, last = audit.shape, audit.waves[-1]
        leave = f"; a wave leaves in {self.leave_us:.1f} us" if self.leave_us else ""
        ready = (
            "unknown (the profile has no such publication time)" if self.ready_us is None else f"{self.ready_us:.1f}"
        )
        return "\n".join(
            [
                f"{self.design.name}: {self.design.words}",
                f"{audit.profile.name}: {shape.seq_len} tokens, {shape.num_heads} heads of {shape.head_dim}, "
                f"{shape.num_ranks} ranks; {audit.tiles} tiles of {shape.tile_rows} rows in {audit.waves_in_words}, "
                f"{last[1]} of the last {last[0]} remote; Q-loop {audit.gap_us:.1f} us, V/R "
                f"{_drain(audit.volume_bytes, audit.profile):.1f} us{leave}",
                f"attention at {audit.rate_in_words}",
                *(f"  {term.us:6.1f} us  {term.words}" for term in shown),
                *(
                    []
                    if shown
                    else ["     0.0 us  no store waits, no load waits for one, and the last tiles are own ones"]
                ),
                f"cost: sender-visible {self.sender_us:.1f} us, ready {ready} us"
                + ("" if publish is None else f" (publication {self.design.publication}: {publish:.1f})"),
            ]
        )


def predict_cost(
    shape: AttentionShape, profile: PlatformProfile, kernel: KernelDesign, *, store: StoreName = "bulk"
) -> CostPrediction:
    """Predict one call's cost. ProfileError if the profile has another number of ranks or lacks `store`."""
    audit = audit_attention(
        shape,
        profile,
        store=store,
        own_chunk=kernel.own_chunk,
        kernel=kernel.kernel,
        tile_speed=kernel.tile_speed(shape),
    )
    publish_us = profile.publish_inside_us if kernel.publication == "inside" else profile.publish_us
    if not kernel.staged:
        return CostPrediction(kernel, audit, 0.0, _stock_terms(audit), publish_us)
    leave_us = 0.0
    if kernel.headroom is not None:
        tile = {"tile_rows": shape.tile_rows, "key_tile": shape.key_tile, "head_dim": shape.head_dim}
        sigma_us = profile.attention.key_tile_us(**tile, num_sms=profile.num_sms)
        paced_us = shape.key_tiles * sigma_us  # the launch's pace (ops/pace.py) goes by that, whatever tile or head_dim
        leave_us = min(kernel.headroom * _drain(audit.volume_bytes, profile), paced_us / 2)
    return CostPrediction(kernel, audit, leave_us, _staged_terms(audit, leave_us), publish_us)


def _drain(volume_bytes: float, profile: PlatformProfile) -> float:
    return bg.drain_us(volume_bytes=volume_bytes, rate_gb_s=profile.rate_gb_s)


def _stock_terms(audit: AttentionAudit) -> tuple[CostTerm, ...]:
    terms = audit.terms
    return (
        CostTerm(
            "wait_or_drain",
            max(terms.wave_wait_us, terms.last_drain_us),
            f"the larger of the wait inherited from the first remote wave, {terms.wave_wait_us:.1f}, and the last "
            f"wave's drain, {terms.last_drain_us:.1f}",
        ),
        CostTerm("drift", terms.drift_us, "later full remote waves, out of step"),
    )


def _staged_terms(audit: AttentionAudit, leave_us: float) -> tuple[CostTerm, ...]:
    profile, kind, tile_bytes = audit.profile, audit.profile.store(audit.store), audit.shape.tile_bytes
    leaving = [remote for _, remote in audit.waves[:-1] if remote]  # during a later wave's computation

    def queued_us(tiles: int) -> float:
        held = max(leave_us, kind.issue_us)
        issue_us = bg.isolated_issue_us(
            volume_bytes=tiles * tile_bytes,
            rate_gb_s=profile.rate_gb_s,
            floor_us=held,
            capacity_bytes=kind.capacity.middle_bytes,
        )
        wait_us = issue_us - held
        return wait_us if kind.blocked_load_us is None else min(kind.blocked_load_us, wait_us)

    queued = max(map(queued_us, leaving), default=0.0)
    later_full = sum(remote == profile.num_sms for remote in leaving[1:]) if queued else 0
    backpressure_us = sum(
        bg.backpressure_us(
            volume_bytes=remote * tile_bytes,
            rate_gb_s=profile.rate_gb_s,
            floor_us=kind.issue_us,
            gap_us=audit.gap_us,
        )
        for remote in leaving
    )
    return (
        CostTerm("blocked_load", queued, "loads of the next tile behind stores that the path does not take"),
        CostTerm("drift", later_full * (kind.drift_us or 0.0), "the same of later full waves, out of step"),
        CostTerm("backpressure", backpressure_us, "Q-loops shorter than the drain of the wave before"),
        CostTerm("last_drain", audit.terms.last_drain_us, f"{audit.waves[-1][1]} remote tiles leave behind the end"),
    )
