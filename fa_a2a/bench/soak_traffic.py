"""What else runs on the links during a soak: all-reduces through NCCL, and copies to a peer's memory and back."""

from __future__ import annotations

import torch
import torch.distributed as dist

_ELEMENTS = 4 << 20  # int32
_EVERY = 4  # calls; a round takes longer than a call, so that both are always under way


class Traffic:
    """Integers, so that every result has one right value. Each kind on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        peer = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._sum = torch.empty(_ELEMENTS, dtype=torch.int32, device=device)
        self._out = torch.arange(_ELEMENTS, dtype=torch.int32, device=device)
        self._there = torch.empty_like(self._out, device=peer)
        self._back = torch.empty_like(self._out)
        self._wrong = torch.zeros(2, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)

    def start(self, number: int) -> None:
        if number % _EVERY:
            return
        ranks, rank = dist.get_world_size(), dist.get_rank()
        with torch.cuda.stream(self._streams[0]):
            self._sum.fill_(number + rank)
            dist.all_reduce(self._sum)
            want = ranks * number + ranks * (ranks - 1) // 2
            self._wrong[0] += (self._sum != want).any()
        with torch.cuda.stream(self._streams[1]):
            self._out.add_(1)
            self._there.copy_(self._out, non_blocking=True)
            self._back.copy_(self._there, non_blocking=True)
            self._wrong[1] += (self._back != self._out).any()

    def wrong(self) -> int:
        """Rounds of either kind with a wrong value. Waits for what is under way."""
        torch.cuda.synchronize()
        return int(self._wrong.sum())
