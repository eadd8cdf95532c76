"""What a provider of symmetric memory offers: blocks that every rank of a group has mapped, and signals on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import FaA2AError, PeerFailedError, PeerMismatchError, PeerTimeoutError, UnsupportedError
from ..layout import ARRIVED_WORD, READY_WORD, TOLD_WORD, Notice, Reason, Word, next_step


@dataclass(frozen=True)
class SymmetricBlock:
    """One allocation of the same size on every rank of the group, each mapped here.

    peers[r] is rank r's memory as uint8, own included; addresses[r] is where it is mapped.
    """

    nbytes: int
    peers: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]
    handle: object = None  # the provider's own


@dataclass(frozen=True)
class Fault:
    """Why a wait ended without success: "deadline"; "mismatch"; "failed", as `peer` said itself; "missed", as
    `teller` says who waited for `peer` until its own deadline. in_kernel: found by a kernel, which then ended itself
    and with it the process's CUDA context."""

    kind: str
    word: Word
    rank: int
    peer: int
    expected_epoch: int
    found_epoch: int
    teller: int = -1
    in_kernel: bool = False

    @staticmethod
    def told(notice: Notice, word: Word, rank: int, epoch: int) -> Fault:
        """What a notice means for a wait of this rank."""
        if notice.reason is Reason.FAILED:
            return Fault("failed", word, rank, notice.rank, epoch, 0)
        return Fault("missed", word, rank, notice.missing, epoch, 0, notice.rank)

    def error(self, timeout_s: float) -> FaA2AError:
        way_out = "call fa_a2a.close(group) on every rank, then go on"
        if self.in_kernel:
            way_out = "the CUDA context of this process has ended: start the processes anew"
        step = {Word.ARRIVED: "the exchange before attention", Word.READY: "the exchange after attention"}[self.word]
        if self.kind == "failed":
            return PeerFailedError(
                f"rank {self.peer} failed in call {self.expected_epoch}, or left it unfinished: its own error says "
                f"why; {way_out}"
            )
        if self.kind == "missed":
            return PeerTimeoutError(
                f"rank {self.teller} gave up waiting for rank {self.peer}, and with it call {self.expected_epoch} "
                f"(rank {self.rank} was in {step}); {way_out}"
            )
        if self.kind == "deadline":
            return PeerTimeoutError(
                f"rank {self.peer} did not finish {step} of call {self.expected_epoch} within {timeout_s:g} s "
                f"(rank {self.rank} found its call {self.found_epoch}); {way_out}"
            )
        return PeerMismatchError(
            f"rank {self.peer} made call {self.expected_epoch} with other arguments than rank {self.rank}, or failed "
            f"in it: rank {self.peer}'s own error says what differs, or, where it only says the same of rank "
            f"{self.rank}, both made a call that all ranks have made before, but not in the same order; shapes, dtypes "
            f"and options must be the same on every rank in each call; {way_out}"
        )


class Release(NamedTuple):
    """What a kernel needs to end a call itself: publish `ready` to every peer when its stores are done, and wait for
    theirs. In the order in which the kernels take it. flags are the signal kernel's; 0 leaves the end of the call to
    something else."""

    peer_blocks: torch.Tensor
    counter: torch.Tensor
    rank: int
    num_ranks: int
    flags: int
    deadline_ns: int
    record: int

    @staticmethod
    def none(device: torch.device) -> Release:
        """For a kernel outside of any workspace."""
        zeros = torch.zeros(2, dtype=torch.int64, device=device)
        return Release(zeros[:1], zeros[1:], rank=0, num_ranks=1, flags=0, deadline_ns=0, record=0)


class SymmetricMemory(ABC):
    """Provider of symmetric blocks for one group. allocate and free are collective over the group."""

    device: torch.device
    positions: tuple[int, ...]  # place of each group rank among all mappings; see layout.chunk_owners
    world: int
    name: str

    @abstractmethod
    def allocate(self, nbytes: int, timeout_s: float) -> SymmetricBlock:
        """A zeroed block; returns when every rank has it mapped."""

    @abstractmethod
    def free(self, block: SymmetricBlock, timeout_s: float) -> None: ...

    @abstractmethod
    def signal(
        self,
        block: SymmetricBlock,
        word: Word,
        *,
        advance: bool = False,
        publish: bool = False,
        wait: bool = False,
        fingerprint: int = 0,
        timeout_s: float = 30.0,
    ) -> None:
        """Steps of the protocol on the ranks' signal blocks, in this order: count the call, publish its number to every
        rank, wait until every rank has published it. Everything this rank stored before is visible to whoever sees
        the publication. On GPUs it is enqueued on the current stream and reports faults through `fault`."""

    def tell(self, block: SymmetricBlock, rank: int, reason: Reason, missing: int = 0) -> None:
        """Tells the peers' waits that `rank`, this one, publishes nothing more; on GPUs after all it has enqueued.

        No fence is due: a wait that reads the word goes by the word alone, and reads nothing else on its account.
        """
        own = block.peers[rank].view(torch.int64)
        step = next_step(own[ARRIVED_WORD + rank], own[READY_WORD + rank])
        notice = (step << 24) | Notice(reason, rank, missing, 0).packed()
        for peer in block.peers:
            peer.view(torch.int64)[TOLD_WORD].copy_(notice)

    def release(
        self, block: SymmetricBlock, timeout_s: float, *, advance: bool = False, silent: bool = False
    ) -> Release:
        """For a kernel that ends a call itself. advance: it also counts the call; silent: something else ends it."""
        raise UnsupportedError(f"no kernel ends its calls itself over {self.name}")

    @abstractmethod
    def fault(self) -> Fault | None:
        """A fault that an enqueued wait ran into, or None."""

    @abstractmethod
    def words(self, block: SymmetricBlock) -> list[int]:
        """This rank's signal words as unsigned integers, after all work enqueued so far."""
