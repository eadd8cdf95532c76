"""The SMs' clock beside a time: what a long kernel takes depends on it, and it depends on the power that is drawn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch

from ..errors import FaA2AError

_BLOCKS_PER_SM = 8  # more than one, so that every SM gets one


class Clock:
    """Of one GPU. Needs the CuTe DSL, as the fused kernels do."""

    def __init__(self, device: torch.device) -> None:
        from fa4_a2a.clock import SLOTS, WORDS, load_clock

        properties = torch.cuda.get_device_properties(device)
        self._kernel = load_clock(f"sm_{properties.major}{properties.minor}a")
        self._blocks = _BLOCKS_PER_SM * properties.multi_processor_count
        self._tables = [torch.zeros(SLOTS, WORDS, dtype=torch.int64, device=device) for _ in range(2)]

    def start(self) -> None:
        """Here on the current stream the time begins."""
        self._kernel(self._tables[0].view(-1), self._blocks)

    def stop(self) -> None:
        self._kernel(self._tables[1].view(-1), self._blocks)

    def mhz(self) -> float:
        """Mean clock between start and stop, the median over SMs. Waits for both."""
        begin, end = (table.tolist() for table in self._tables)
        return mean_mhz(begin, end)


def mean_mhz(begin: Sequence[Sequence[int]], end: Sequence[Sequence[int]]) -> float:
    """begin, end: (cycles, ns) of each SM, zeros for one that was not seen."""
    seen = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in zip(begin, end, strict=True) if a[1] and b[1] > a[1]]
    if not seen:
        raise FaA2AError("no SM told its clock at both ends of a measurement: a bug")
    return 1e3 * statistics.median(seen)


def at_clock_of(times_us: Sequence[float], mhz: Sequence[float], reference_mhz: Sequence[float]) -> list[float]:
    """Each round's time as it were at the reference's clock of that round: the same cycles. Right as far as the SMs'
    clock sets the time: links and memory have clocks of their own."""
    return [us * own / other for us, own, other in zip(times_us, mhz, reference_mhz, strict=True)]


def median_cycles(times_us: Mapping[str, Sequence[float]], mhz: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """By method, the median over rounds of the cycles that its time took; of those alone whose clock is known."""
    return {name: statistics.median(us * f for us, f in zip(times_us[name], mhz[name], strict=True)) for name in mhz}
