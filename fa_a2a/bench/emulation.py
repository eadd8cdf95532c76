"""What two GPUs need to stand for more: each is rank 0 of P, and finds in the other one its ranks 1 to P - 1.

O: slot c of `slots` belongs to the owner of chunk c, slot 0 on this GPU, the others on the other one. Signals: the word
of rank c in this GPU's signal block is written by the other GPU, whose peer c this is: its table of the peers' blocks
holds, as peer c, this GPU's block c words on, so that what it writes as rank 0 lands in rank c's place. So each GPU
publishes to P peers and waits for P of them, and one that lacks is missed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from einops import rearrange

from ..comm.group import Group
from ..comm.symmetric import Release, SymmetricBlock
from ..errors import FaA2AError, UnsupportedError
from ..layout import SIGNAL_BYTES, ExchangeShape
from ..nn import UlyssesAttention
from ..ops import kernels
from ..ops.fused import local_sink
from ..ops.kernels import AttentionKernel, Qkv, Sink
from . import draws
from .slots import Slots
from .sweep import Case
from .timing import meet

DEADLINE_S = 30.0


class Emulation:
    """One of the two GPUs, with the work of one case. Made, checked and closed by both ranks together."""

    def __init__(self, case: Case, num_ranks: int, group: Group, device: torch.device) -> None:
        self.case, self.group, self.device = case, group, device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        sizes = (case.batch, case.seq_len, case.num_heads, case.head_dim)
        self.shape = ExchangeShape(*sizes, num_ranks, self.dtype.itemsize)
        self.scale = case.head_dim**-0.5
        self.adapter: AttentionKernel = kernels.load(case.kernel, device, self.dtype, case.head_dim, False, True)
        if not self.adapter.can_release:
            what = f"kernel '{case.kernel}' with head_dim {case.head_dim}"
            raise UnsupportedError(f"--emulate measures kernels that end a call themselves, and {what} does not")
        small = torch.zeros(3, 1, 128, 2, 128, device=device, dtype=self.dtype)
        with torch.no_grad():  # makes the two ranks' workspace
            UlyssesAttention(kernel=case.kernel, exchange="fused")(*small)
        assert group.workspace is not None
        self.memory = group.workspace.memory
        self._ranks = group.workspace.signals  # of the two; those of the emulated ranks are a block of their own
        self._blocks: list[SymmetricBlock] = []
        self.slots = Slots(group, device, num_ranks, self.shape.tensor_bytes)
        with self.guarded():
            self.signals = self.allocate(SIGNAL_BYTES)
            own, other = self.signals.addresses[group.rank], self.signals.addresses[1 - group.rank]
            blocks = [own, *(other + 8 * c for c in range(1, num_ranks))]
            self._table = torch.tensor(blocks, dtype=torch.int64, device=device)
            self.local = local_sink(self.shape, self.dtype, device)
            # no LSE is asked for, so that the local one serves
            self.sink = Sink(
                tuple(o[:, :, : self.shape.local_heads] for o in self._outputs(self.slots.views)), self.local.lse
            )

    def allocate(self, nbytes: int) -> SymmetricBlock:
        """A block that `close` frees. Collective."""
        self._blocks.append(self.memory.allocate(nbytes, DEADLINE_S))
        return self._blocks[-1]

    def close(self) -> None:
        try:
            self.slots.close()  # which waits until neither GPU stores any more
        finally:
            while self._blocks:
                self.memory.free(self._blocks.pop(0), DEADLINE_S)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Around steps that use this: an error closes it, and is raised whatever closing meets."""
        try:
            with self.group.together():
                yield
        except BaseException:
            with contextlib.suppress(Exception):
                self.close()
            raise

    def work(self, gpu: int) -> Qkv:
        """What a GPU computes on: q in chunk order, k and v, (B, S, h, D)."""
        s = self.shape
        return self.random(gpu, (s.batch, s.seq_len, s.local_heads, s.head_dim))

    def random(self, gpu: int, shape: tuple[int, ...]) -> Qkv:
        """q, k, v of a GPU, drawn on either."""
        return draws.qkv(shape, self.dtype, self.device, seed=1 + gpu)

    def align(self) -> None:
        """Makes the two GPUs' streams go on together."""
        meet(self.memory, self._ranks)

    def release(self, *, silent: bool = False) -> Release:
        """The end of a call among all ranks: it counts the call, publishes and waits; silent: something else does."""
        release = self.memory.release(self.signals, DEADLINE_S, advance=True, silent=silent)
        return release._replace(peer_blocks=self._table, rank=0, num_ranks=self.shape.num_ranks)

    def expected(self, gpu: int) -> torch.Tensor:
        """What a GPU stores, O (P, B, s, h, D), computed here."""
        out, _ = self.adapter.local(*self.work(gpu), self.scale, self.shape.num_ranks, False)
        return rearrange(out, "b (p s) h d -> p b s h d", p=self.shape.num_ranks)

    def check(self, ready: Callable[[], object]) -> None:
        """One call into memory full of ones: afterwards it holds what the two GPUs should have stored, and ones.
        FaA2AError on both ranks where it does not."""
        here = (self.slots.views[0], *self.slots.received)
        for slot in here:
            slot.fill_(0xFF)
        torch.cuda.synchronize(self.device)
        self.group.barrier("emulated memory", DEADLINE_S)
        ready()
        torch.cuda.synchronize(self.device)
        stored = [self.expected(self.group.rank)[0], *self.expected(1 - self.group.rank)[1:]]
        bad = 0
        for got, want in zip(self._outputs(here), stored, strict=True):
            whole = torch.full(got.shape, -1, dtype=torch.int16, device=self.device)
            whole[:, :, : self.shape.local_heads] = want.view(torch.int16)
            bad += int((got.view(torch.int16) != whole).sum())
        bad += sum(int((slot[self.shape.tensor_bytes :] != 0xFF).sum()) for slot in here)
        told = self.group.exchange("emulated outputs", bad, DEADLINE_S)
        if any(told):
            raise FaA2AError(f"{told} elements of the two GPUs' outputs are wrong: a bug; no time is reported")

    def _outputs(self, slots: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """O (B, s, H, D) of each slot's rank."""
        s = self.shape
        sizes = (s.batch, s.local_seq, s.num_heads, s.head_dim)
        return tuple(slot[: s.tensor_bytes].view(self.dtype).view(sizes) for slot in slots)
