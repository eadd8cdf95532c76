"""A launch of attention in the simulation: its tiles on the SMs, staged and paced as the kernel's design says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ConfigurationError
from .cost import predict_cost
from .designs import KernelDesign
from .platform import PlatformProfile, StoreName
from .shape import AttentionShape
from .simulate import SLICES, At, Path, Send, Sender, burst, run


@dataclass(frozen=True)
class AttentionRun:
    """Result of simulate_attention, in us."""

    end_us: float
    """The last tile is computed and taken by the path."""
    local_us: float
    """The same with all stores local."""
    tail_us: float
    """How long the last remote byte is under way behind the end."""
    peak_bytes: float
    longest_wait_us: float
    """Of one tile's stores together, beyond what they take on an empty path."""
    arrived_us: dict[int, float]
    """By owner (its distance from the sender, 1 to P - 1): when its last byte has arrived."""

    @property
    def cost_us(self) -> float:
        """What remote stores add until the kernel has ended, which it does when its stores are done."""
        return self.end_us + self.tail_us - self.local_us


def simulate_attention(
    shape: AttentionShape,
    profile: PlatformProfile,
    kernel: KernelDesign,
    *,
    store: StoreName = "bulk",
    spread: float = 0.0,
    seed: int = 0,
) -> AttentionRun:
    """One launch of the kernel on one rank, every rank alike. The path holds the middle of the capacity's range.

    spread: tiles' times vary uniformly by this share of the Q-loop to both sides; 0: all in step, the worst case
    but for a few shapes whose last tiles a delay can hit.
    """
    if not 0 <= spread < 1:
        raise ConfigurationError(f"spread is a share of a tile's time, at least 0 and below 1; got {spread!r}")
    kind, plan = profile.store(store), predict_cost(shape, profile, kernel, store=store)  # for its gap and pace
    chance = random.Random(seed)
    times_us = [plan.audit.gap_us * (1 + spread * chance.uniform(-1, 1)) for _ in range(plan.audit.tiles)]
    remote, local = (
        _Attention(shape, profile.num_sms, kernel, times_us, kind.issue_us, plan.leave_us, is_remote)
        for is_remote in (True, False)
    )
    path = Path(profile.rate_gb_s, kind.capacity.middle_bytes)
    end_us = run(remote.blocks(), path)
    local_us = run(local.blocks(), Path(profile.rate_gb_s))
    return AttentionRun(
        end_us=end_us,
        local_us=local_us,
        tail_us=max(0.0, max(path.arrived_us.values(), default=0.0) - end_us),
        peak_bytes=path.peak_bytes,
        longest_wait_us=max(remote.waits_us, default=0.0),
        arrived_us=dict(path.arrived_us),
    )


class _Attention:
    """The blocks of one launch as senders. times_us: of each tile, in the kernel's order."""

    def __init__(
        self,
        shape: AttentionShape,
        num_sms: int,
        kernel: KernelDesign,
        times_us: Sequence[float],
        issue_us: float,
        leave_us: float,
        remote: bool,
    ) -> None:
        self.shape, self.num_sms, self.kernel, self.times_us = shape, num_sms, kernel, times_us
        self.issue_us, self.pause_us, self.remote = issue_us, leave_us / SLICES, remote
        chunks = [*range(1, shape.num_ranks), 0] if kernel.own_chunk == "last" else [*range(shape.num_ranks)]
        self.owners = [chunk for chunk in chunks for _ in range(shape.chunk_tiles)]
        self.waits_us: list[float] = []

    def blocks(self) -> list[Sender]:
        if not self.kernel.staged:
            queue = iter(range(len(self.owners)))
            return [self._leaving(lambda: next(queue, None)) for _ in range(self.num_sms)]
        every = range(len(self.owners))
        return [self._staying(every[sm :: self.num_sms]) for sm in range(self.num_sms)]

    def _leaving(self, take: Callable[[], int | None]) -> Sender:
        """An SM that runs one block after another; each waits for its store before it leaves."""
        now_us = 0.0
        while (tile := take()) is not None:
            now_us = yield At(now_us + self.times_us[tile])
            if self.remote and self.owners[tile]:
                begin_us = now_us
                now_us = yield from burst(now_us, self.shape.tile_bytes, self.issue_us, SLICES, self.owners[tile])
                self.waits_us.append(now_us - begin_us - self.issue_us)
            else:
                now_us = yield At(now_us + self.issue_us)

    def _staying(self, tiles: Sequence[int]) -> Sender:
        """A block that stays: each tile leaves, slice by slice, while the next one is computed, whose loads wait as
        long as a slice does. The last one leaves at once."""
        now_us, staged = 0.0, None
        for tile in [*tiles, None]:
            begin_us, late_us = now_us, 0.0
            if staged is not None and self.remote and self.owners[staged]:
                for _ in range(SLICES):
                    taken_us = yield Send(self.shape.tile_bytes / SLICES, self.owners[staged])
                    late_us += taken_us - now_us
                    if tile is not None and self.pause_us:
                        now_us = yield At(taken_us + self.pause_us)
                    else:
                        now_us = taken_us
                self.waits_us.append(late_us)
            if tile is None:
                return
            now_us = yield At(max(now_us, begin_us + self.times_us[tile] + late_us))
            staged = tile
