"""The protocol on one group's buffers (buffers.py): whose turn it is, what is announced, and how a call ends for all.

Why one buffer of each is enough (call n on this rank; `arrived` and `ready` are published at system scope):
  scatter    stores q, k, v to every peer and publishes arrived = n. Allowed, since in call n-1 this rank acquired
             ready >= n-1 from every peer, so none still reads what was sent for n-1.
  attention  starts after acquiring arrived >= n from every peer. An owner published that after its last use of O of
             call n-1 in stream order, so O may be overwritten.
  ready      is published when the attention kernel has ended, and acquired from every peer before O is read.
The overlapped form does all of it in one kernel. arrived = n then says that a rank has begun call n; its q, k, v follow
part by part, each with a word of its own. A tile for an owner is stored after that owner's queries were acquired, which
it sent in call n, behind its last use of O of call n-1: the same argument with those words in the place of arrived.
A rank that can make no further step says so in a word beside these (Notice in layout.py), which waits look at; without
it they would end at their deadlines only.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from .. import config
from ..errors import PeerError, WorkspaceError
from ..layout import (
    ARRIVED_WORD,
    EPOCH_WORD,
    READY_WORD,
    SIGNAL_BYTES,
    TOLD_WORD,
    ExchangeShape,
    Notice,
    Reason,
    Word,
    signed_difference,
)
from .buffers import Buffers
from .symmetric import Fault, SymmetricMemory

if TYPE_CHECKING:
    from .group import Group

_FIRST_EPOCH = 0  # the number before the first call's; tests start just below 2^32 and 2^63, the same on every rank


class Workspace(Buffers):
    """Buffers, signal words and call order of one group. Made by every rank of the group together; so is every growth
    and `close`."""

    def __init__(self, group: Group, memory: SymmetricMemory, timeout_s: float) -> None:
        super().__init__(group, memory)
        with torch.inference_mode(False):  # the buffers outlive the caller's mode
            self.signals = memory.allocate(SIGNAL_BYTES, timeout_s)
        if _FIRST_EPOCH:
            self._count_from(_FIRST_EPOCH, timeout_s)
        self.turn = "scatter"  # "nothing" while the attention of a call is being enqueued, or on CPUs computed
        self._turning = threading.Lock()
        self.call = object()  # stands for the call whose q, k, v are here
        self.closed = False
        self._last_stream: torch.cuda.Stream | None = None
        self._last_handle = -1
        self.debug = config.debug()  # read anew for each call

    def _count_from(self, epoch: int, timeout_s: float) -> None:
        words = self.signals.peers[self.group.rank].view(torch.int64)
        signed = signed_difference(epoch, 0)
        for first, count in ((EPOCH_WORD, 1), (ARRIVED_WORD, self.group.size), (READY_WORD, self.group.size)):
            words[first : first + count] = signed
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)
        self.group.barrier("first epoch", timeout_s)

    @property
    def allocated_bytes(self) -> int:
        """Symmetric bytes held on this rank. torch's memory statistics do not see them on GPUs."""
        return 0 if self.closed else sum(block.nbytes for block in (self.signals, *self.blocks))

    def reserve(self, shape: ExchangeShape, timeout_s: float) -> None:
        """Grows the buffers to hold `shape`, if they do not yet; only between two calls. See `grow`."""
        if not self.fits(shape):
            self.check_turn("scatter")
            self.grow(shape, timeout_s)

    def check(self, timeout_s: float) -> None:
        """Raises if the workspace is closed, poisoned, or a wait of an earlier call failed."""
        if self.closed:
            raise WorkspaceError(
                "the workspace is closed; make a new UlyssesAttention or call again after fa_a2a.close"
            )
        fault = self.memory.fault()
        if fault is not None and self.group.poisoned is None:
            error = fault.error(timeout_s)
            self.group.poisoned = str(error)
            raise error
        self.group.check_usable()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def check_turn(self, step: str) -> None:
        """Calls alternate scatter, attention; anything else would overwrite what a peer still reads. A second thread is
        refused, not made to wait: which of its calls would meet which of the peers' nobody could say."""
        if step != self.turn:
            raise WorkspaceError(
                f"calls on a workspace alternate scatter_heads and attention_gather; got {step}, due was {self.turn}; "
                "finish each scatter_heads with attention_gather, use one thread for each group, or call "
                "fa_a2a.close(group) on every rank"
            )

    def take_turn(self, step: str) -> None:
        with self._turning:
            self.check_turn(step)
            self.turn = "attention" if step == "scatter" else "nothing"
        if step == "scatter":
            self.call = object()
            self.debug = config.debug()

    def end_turn(self) -> None:
        """The call is over; an error in it leaves the turn at "nothing", until the workspace is made anew."""
        self.turn = "scatter"

    def order_streams(self) -> None:
        """Makes the current stream wait for the stream of the call before, if that was another one."""
        if self.memory.device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            self.captured = True
            return
        # the handle alone costs the host a tenth of what a Stream does
        handle = torch._C._cuda_getCurrentRawStream(self.memory.device.index)
        if handle == self._last_handle:
            return
        stream = torch.cuda.current_stream(self.memory.device)
        if self._last_stream is not None:
            stream.wait_stream(self._last_stream)
        self._last_stream, self._last_handle = stream, handle

    # -- steps of a call -----------------------------------------------------------------------------------------------

    def announce(self, fingerprint: int, timeout_s: float) -> None:
        """Opens call n: publishes that this rank's stores for it are done, and waits for everyone's."""
        self._signal(Word.ARRIVED, timeout_s, advance=True, publish=True, wait=True, fingerprint=fingerprint)

    def finish(self, timeout_s: float) -> None:
        """Closes call n: publishes that this rank's part of every output is stored, and waits for everyone's."""
        self._signal(Word.READY, timeout_s, publish=True, wait=True)

    def abort(self) -> None:
        """Tells the peers, who have begun a call that this rank cannot make, that there will be none."""
        self.memory.signal(self.signals, Word.ARRIVED, advance=True, publish=True, fingerprint=0)

    def peers_ahead(self) -> list[int]:
        """Ranks that have already begun the call after this rank's last one. Waits for work enqueued so far.

        Raises PeerFailedError or PeerTimeoutError where a rank has told that it makes no further step.
        """
        words = self.memory.words(self.signals)
        epoch = words[EPOCH_WORD]
        if (notice := Notice.unpacked(words[TOLD_WORD])) is not None:
            raise Fault.told(notice, Word.ARRIVED, self.group.rank, epoch + 1).error(0.0)
        return [r for r in range(self.group.size) if signed_difference(words[ARRIVED_WORD + r], epoch) > 0]

    def _signal(self, word: Word, timeout_s: float, **steps: Any) -> None:
        try:
            self.memory.signal(self.signals, word, timeout_s=timeout_s, **steps)
        except BaseException as error:
            self.poison(error)
            raise

    # -- failure -------------------------------------------------------------------------------------------------------

    def poison(self, error: BaseException) -> None:
        """Whatever ends a step of a call half-way, Ctrl-C too, leaves the ranks apart: no further call is taken, and
        the peers are told, unless it is from them that this rank has it."""
        if self.group.poisoned is None and not isinstance(error, PeerError):
            self._tell()
        self.group.poisoned = self.group.poisoned or str(error) or type(error).__name__

    def _tell(self) -> None:
        """Ends the peers' waits for this rank. Best effort: without it they end at their deadlines."""
        if self.memory.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # nothing of the call has run
        with contextlib.suppress(Exception):
            self.memory.tell(self.signals, self.group.rank, Reason.FAILED)

    # -- debug mode ----------------------------------------------------------------------------------------------------

    def poison_output(self) -> None:
        """Debug mode: fills O and LSE with NaN, so that whatever a call fails to write shows."""
        if self.debug and self.block is not None:
            own = self.block.peers[self.group.rank]
            for name in ("o", "lse"):
                own[self.map.offset(name) : self.map.offset(name) + self.map.capacity(name)] = 0xFF

    def check_guards(self) -> None:
        """Debug mode: raises WorkspaceError if a guard region was written to. Waits for the device."""
        if self.debug and (damaged := self.damaged_guards()):
            error = WorkspaceError(
                f"guard regions at bytes {damaged} were overwritten: a store went past its buffer; this is a bug of "
                "fa_a2a"
            )
            self.poison(error)
            raise error

    # -- end -----------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Frees the buffers. Collective; outputs that are views of the workspace end here."""
        if self.closed:
            return
        self.closed = True
        if self.turn != "scatter" and self.group.poisoned is None:
            self._tell()  # a call left half-way: whoever waits for its other half need not any more
        if self.memory.device.type == "cuda" and self.memory.fault() is None:
            torch.cuda.synchronize(self.memory.device)
        self.group.leave(timeout_s)
        self.free(timeout_s)
        self.memory.free(self.signals, timeout_s)
