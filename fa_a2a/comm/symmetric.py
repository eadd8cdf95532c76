"""What a provider of symmetric memory offers: blocks that every rank of a group has mapped, and signals on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..errors import FaA2AError, PeerMismatchError, PeerTimeoutError, UnsupportedError
from ..layout import Word


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
    """Why a wait ended without success. `kind` is "deadline" or "mismatch"."""

    kind: str
    word: Word
    rank: int
    peer: int
    expected_epoch: int
    found_epoch: int

    def error(self, timeout_s: float) -> FaA2AError:
        step = {Word.ARRIVED: "the exchange before attention", Word.READY: "the exchange after attention"}[self.word]
        if self.kind == "deadline":
            return PeerTimeoutError(
                f"rank {self.peer} did not finish {step} of call {self.expected_epoch} within {timeout_s:g} s "
                f"(rank {self.rank} found its call {self.found_epoch}); the workspace must be made anew on every rank"
            )
        return PeerMismatchError(
            f"rank {self.peer} made call {self.expected_epoch} with other arguments than rank {self.rank}, or failed "
            "in it; shapes, dtypes and options must be the same on every rank"
        )


@dataclass(frozen=True)
class Release:
    """What a kernel needs to end a call itself: publish `ready` to every peer when its stores are done, and wait for
    theirs. flags are the signal kernel's; 0 leaves the end of the call to something else."""

    peer_blocks: torch.Tensor
    rank: int
    num_ranks: int
    record: int
    counter: torch.Tensor
    flags: int
    deadline_ns: int

    @staticmethod
    def none(device: torch.device) -> Release:
        """For a kernel outside of any workspace."""
        zeros = torch.zeros(2, dtype=torch.int64, device=device)
        return Release(zeros[:1], 0, 1, 0, zeros[1:], 0, 0)


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
