"""The microbenchmark on this rank's GPU: one launch of bursts at a time, all ranks' launches aligned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..comm.group import Group
from ..comm.nvshmem import Nvshmem
from ..errors import FaA2AError
from ..layout import SIGNAL_BYTES, Word

REGION_BYTES = 32 << 20  # of one sender in a receiver's memory, at least; successive bursts walk through it
DELAY_US = 150.0  # the stream is busy while every rank's host enqueues what follows: see launch()
DEADLINE_S = 5.0  # of one launch; the longest takes about 10 ms
LONG_SPAN_NS = 400_000  # globaltimer may tick in steps of 1 us: a shorter launch says nothing about the clock


@dataclass(frozen=True)
class Setting:
    """What one launch does. Times in us; see fa4_a2a.burst for what the flags mean."""

    experiment: str
    store: str
    traffic: str
    num_ctas: int
    bytes_per_cta: int
    bursts: int
    gap_us: float
    slices: int = 1
    pace_us: float = 0.0
    flags: int = 0
    repeats: int = 1  # launches in a round


@dataclass(frozen=True)
class Launch:
    """What one launch showed on one rank, in us."""

    total_us: float
    """Between events around it: with the launch itself and, at a kernel's end, the drain of its stores."""
    gap_us: float
    """A burst's gap, mean of all blocks, whatever is not issue time or the wait for a fence."""
    issue_us: float
    """A burst's issue time, mean of all blocks."""
    steady_us: float
    """The period while every block still runs; of bursts that are not released."""
    slowest_us: list[float]
    """Of each burst whose start was released: the slowest block's issue time, and the median block's."""
    median_us: list[float]
    behind_slowest_us: list[float]
    """The same of the wait behind each burst, for a load or a fence."""
    behind_median_us: list[float]
    done_us: list[float]
    """The slowest block's issue time and wait together."""
    block_us: float
    """All bursts' issue time of the block that took longest."""


def steady_us(cycles: torch.Tensor) -> float:
    """Period of all blocks together while all of them run, from what each burst took its block, gap included
    [bursts, blocks]: blocks x time / bursts done in it, counted from a quarter of the time until the first block ends.
    """
    ends = cycles.cumsum(0)
    until = ends[-1].min()

    def done(moment: torch.Tensor) -> torch.Tensor:
        current = (ends <= moment).sum(0, keepdim=True).clamp(max=len(ends) - 1)
        left = (ends.gather(0, current) - moment) / cycles.gather(0, current)
        return (current + 1 - left).sum()

    return cycles.shape[1] * float(0.75 * until / (done(until) - done(until / 4)))


class Bursts:
    """Buffers, address tables and kernels. Collective over `group` to make, to launch and to close."""

    def __init__(self, group: Group, device: torch.device, num_sms: int, timeout_s: float = 30.0) -> None:
        from fa4_a2a import burst

        self.group, self.device, self.num_sms, self.timeout_s = group, device, num_sms, timeout_s
        self.memory = Nvshmem(group, device, timeout_s)
        arch = "sm_{}{}a".format(*torch.cuda.get_device_capability(device))
        self.kernels = {store: burst.load_burst(arch, store) for store in burst.STORES}
        self.fence, self.released = int(burst.Flags.FENCE), int(burst.Flags.RELEASE_EACH)
        self.summary_fields = burst.Summary
        self.region_bytes = max(REGION_BYTES, num_sms * burst.MAX_BURST_BYTES)
        self.signals = self.memory.allocate(SIGNAL_BYTES, timeout_s)
        self.data = self.memory.allocate(group.size * self.region_bytes, timeout_s)
        me, size = group.rank, group.size
        others = [(me + k) % size for k in range(1, size)]
        tables = {
            "remote": [self.data.addresses[peer] + me * self.region_bytes for peer in others],
            "local": [self.data.addresses[me] + peer * self.region_bytes for peer in others],
        }
        self.tables = {
            name: torch.tensor(table, dtype=torch.int64, device=device) for name, table in tables.items()
        }  # the local control has as many targets, so the addresses are made the same way
        self.source = torch.zeros(num_sms * burst.LOAD_BYTES, dtype=torch.uint8, device=device)
        self.summary = self._words(num_sms * burst.SUMMARY_WORDS)
        self.control = self._words(burst.CONTROL_WORDS)
        self.scratch = self._words(num_sms * burst.SUMMARY_WORDS)
        self.unused = self._words(num_sms)
        self.clocks_per_us = 1e3  # until measured
        self._measure_clock()

    def _words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def _measure_clock(self) -> None:
        for _ in range(3):
            self._delay(5000.0)
            torch.cuda.synchronize(self.device)
        self._update_clock(self.scratch)

    def _update_clock(self, summary: torch.Tensor) -> None:
        """Cycles per us, from a launch long enough to say."""
        f = self.summary_fields
        table = summary.view(self.num_sms, -1)
        spans_ns = table[:, f.END_NS] - table[:, f.START_NS]
        clocks = table[:, f.END_CLOCK] - table[:, f.START_CLOCK]
        used = spans_ns > LONG_SPAN_NS
        if bool(used.any()):
            self.clocks_per_us = float((clocks[used].double() / spans_ns[used].double()).median()) * 1e3

    def _clocks(self, us: float) -> int:
        return round(us * self.clocks_per_us)

    def _delay(self, us: float) -> None:
        self.kernels["st"](
            *(self.tables["local"], self.scratch, self.unused, self.unused, self.control, self.source.data_ptr()),
            *(self.num_sms, 1, 1, 0, 16, 1, 0, self._clocks(us), 0, 0, int(DEADLINE_S * 1e9)),
        )

    def launch(self, setting: Setting) -> Launch | None:
        """Runs it on the ranks that send, starting within about 2 us of each other. None on a rank that does not.

        The delay keeps the stream busy while the slowest host enqueues; then the signal aligns the streams, and what
        is behind it starts without its host.
        """
        sends = setting.traffic != "one_sender" or self.group.rank == 0
        self.control.zero_()
        summary, issue, behind = self.summary, *(self._words(setting.bursts * setting.num_ctas) for _ in range(2))
        summary.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._delay(DELAY_US)
        self.memory.signal(self.signals, Word.READY, advance=True, publish=True, wait=True, timeout_s=self.timeout_s)
        if sends:
            volume_bytes = setting.num_ctas * setting.bytes_per_cta
            targets = self.tables["local" if setting.traffic == "local" else "remote"]
            begin.record()
            self.kernels[setting.store](
                *(targets, summary, issue, behind, self.control, self.source.data_ptr()),
                *(setting.num_ctas, len(targets), setting.bursts, setting.slices),
                *(setting.bytes_per_cta // setting.slices, self.region_bytes // volume_bytes, volume_bytes),
                *(self._clocks(setting.gap_us), self._clocks(setting.pace_us), setting.flags, int(DEADLINE_S * 1e9)),
            )
            end.record()
        torch.cuda.synchronize(self.device)
        fault = self.memory.fault()
        if fault is not None:
            raise fault.error(self.timeout_s)
        if not sends:
            return None
        return self._read(setting, summary, issue, behind, begin.elapsed_time(end) * 1e3)

    def _read(
        self, setting: Setting, summary: torch.Tensor, issue: torch.Tensor, behind: torch.Tensor, total_us: float
    ) -> Launch:
        f = self.summary_fields
        table = summary.view(self.num_sms, -1)[: setting.num_ctas]
        errors, done = int(table[:, f.ERROR].max()), int(table[:, f.BURSTS].min())
        if errors or done != setting.bursts:
            raise FaA2AError(
                f"every block must end its bursts in time, got {done} bursts and code {errors} (fa4_a2a.burst.Failure) "
                f"on rank {self.group.rank} in {setting}; another program may hold this GPU's SMs: run alone on it"
            )
        self._update_clock(summary)
        shape = (setting.bursts, setting.num_ctas)
        issued, waited = (t.view(shape).double() / self.clocks_per_us for t in (issue, behind))
        spans = (table[:, f.END_CLOCK] - table[:, f.START_CLOCK]).double() / self.clocks_per_us
        busy = issued + waited if setting.flags & self.fence else issued
        gaps = (spans - busy.sum(0)) / setting.bursts
        kept = setting.bursts if setting.flags & self.released else 0
        return Launch(
            total_us=total_us,
            gap_us=float(gaps.mean()),
            issue_us=float(issued.mean()),
            steady_us=steady_us(busy + gaps),
            slowest_us=issued.amax(1)[:kept].tolist(),
            median_us=issued.median(1).values[:kept].tolist(),
            behind_slowest_us=waited.amax(1)[:kept].tolist(),
            behind_median_us=waited.median(1).values[:kept].tolist(),
            done_us=busy.amax(1)[:kept].tolist(),
            block_us=float(issued.sum(0).max()),
        )

    def landed(self, setting: Setting) -> bool:
        """Whether the launch's stores are found in this rank's memory, from every peer: else nothing was measured."""
        mine = self.data.peers[self.group.rank]
        mine.zero_()
        torch.cuda.synchronize(self.device)
        self.group.barrier("calibration", self.timeout_s)
        self.launch(setting)
        self.memory.signal(self.signals, Word.READY, advance=True, publish=True, wait=True, timeout_s=self.timeout_s)
        regions = mine.view(self.group.size, -1).view(torch.int64)
        return all(bool(regions[peer].any()) for peer in range(self.group.size) if peer != self.group.rank)

    def close(self) -> None:
        self.memory.free(self.data, self.timeout_s)
        self.memory.free(self.signals, self.timeout_s)
