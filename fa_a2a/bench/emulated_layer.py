"""The overlapped layer of one of P ranks on one of two GPUs; what that means stands in emulate.py.

What a rank sends to the rank that finds it c places on, this GPU sends to the other one, as that one's chunk c: its own
tokens, the heads of that rank. So chunk c of what a GPU computes on is made of the other GPU's tokens, of other heads
for each c, and nothing is there twice.
"""

from __future__ import annotations

import torch

from ..comm.group import Group
from ..layout import aligned
from ..ops import overlap
from ..ops.kernels import Qkv
from ..ops.overlap_schedule import Schedule, prediction, schedule
from .emulation import Emulation
from .sweep import Case


class EmulatedLayer(Emulation):
    """A call is one layer: q, k, v (1, s, H, D) of this GPU, O in both GPUs' slots."""

    def __init__(
        self, case: Case, num_ranks: int, group: Group, device: torch.device, chosen: Schedule | None = None
    ) -> None:
        super().__init__(case, num_ranks, group, device)
        with self.guarded():
            self._prepare(chosen)

    def _prepare(self, chosen: Schedule | None) -> None:
        from fa4_a2a.overlap import OverlapPlan

        shape, rank, device, num_ranks = self.shape, self.group.rank, self.device, self.shape.num_ranks
        kernel = overlap.load(device, self.case.dtype, shape.head_dim, False)
        self.schedule = schedule(shape, kernel.tile.rows, kernel.num_sms) if chosen is None else chosen
        self.expected_us = prediction(shape, kernel.tile.rows, kernel.num_sms, self.schedule).exposed_us
        nbytes = aligned(shape.tensor_bytes)
        block = self.allocate(3 * nbytes)
        q, k, v = (
            block.peers[rank][i * nbytes :][: shape.tensor_bytes].view(self.dtype).view(self._sizes) for i in range(3)
        )
        own, other = block.addresses[rank], block.addresses[1 - rank]
        addresses = [[(own if peer == 0 else other) + i * nbytes for peer in range(num_ranks)] for i in range(3)]
        chunk_at = [-peer % num_ranks for peer in range(num_ranks)]
        signals = self.signals.addresses[rank], self.signals.addresses[1 - rank]
        self._launch = OverlapPlan(
            kernel,
            overlap.geometry(shape, kernel, self.schedule),
            overlap.sends(shape, kernel, self.schedule),
            range(num_ranks),
            chunk_at,
            addresses,
            [overlap.words(signals[chunk > 0], chunk) for chunk in chunk_at],
            device,
        )
        self._attention = overlap.attention(shape, kernel, self.schedule, (q, k, v), self.sink, self.scale, False)
        self._inputs = self.tokens(rank)
        self._release = self.release()
        self._out = self._outputs(self.slots.views)[0]

    def __call__(self) -> torch.Tensor:
        self._launch(self._attention, self._inputs, self.schedule.send_pace_ns, 1, self._release)
        return self._out

    def tokens(self, gpu: int) -> Qkv:
        s = self.shape
        return self.random(gpu, (1, s.local_seq, s.num_heads, s.head_dim))

    def work(self, gpu: int) -> Qkv:
        """In the order of the overlapped kernel, which ends with the own keys."""
        own, others = self.tokens(gpu), self.tokens(1 - gpu)
        ranks, heads = self.shape.num_ranks, self.shape.local_heads
        q, k, v = (
            [(x if c == 0 else y)[:, :, (-c % ranks) * heads :][:, :, :heads] for c in range(ranks)]
            for x, y in zip(own, others, strict=True)
        )
        return torch.cat(q, dim=1), torch.cat(k[::-1], dim=1), torch.cat(v[::-1], dim=1)

    @property
    def _sizes(self) -> tuple[int, ...]:
        s = self.shape
        return (1, s.seq_len, s.local_heads, s.head_dim)
