"""What a provider of symmetric memory offers: blocks that every rank of a group has mapped, and signals on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..errors import FaA2AError, PeerMismatchError, PeerTimeoutError
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

    @abstractmethod
    def fault(self) -> Fault | None:
        """A fault that an enqueued wait ran into, or None."""

    @abstractmethod
    def words(self, block: SymmetricBlock) -> list[int]:
        """This rank's signal words as unsigned integers, after all work enqueued so far."""
