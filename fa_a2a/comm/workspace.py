"""The symmetric buffers of one group: one Q, K, V, O and LSE, grow-only, and the signal words beside them.

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .. import config
from ..errors import PeerError, ShapeError, WorkspaceError
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
    WorkspaceMap,
    chunk_owners,
    signed_difference,
)
from .symmetric import Fault, SymmetricBlock, SymmetricMemory

if TYPE_CHECKING:
    from ..ops.plan import Plan
    from .group import Group

_GUARD = 0xA5
_FIRST_EPOCH = 0  # the number before the first call's; tests start just below 2^32 and 2^63, the same on every rank
_MAX_PREPARED = 128
_Prepared = TypeVar("_Prepared")


class Workspace:
    """Buffers and call order of one group. Made by every rank of the group together; so is every growth and `close`."""

    def __init__(self, group: Group, memory: SymmetricMemory, timeout_s: float) -> None:
        self.group, self.memory = group, memory
        self.owners = chunk_owners(group.rank, memory.positions, memory.world)
        orders = [chunk_owners(r, memory.positions, memory.world) for r in range(group.size)]
        self.my_chunk_at = tuple(order.index(group.rank) for order in orders)  # where my queries lie in each peer's Q
        with torch.inference_mode(False):  # the buffers outlive the caller's mode
            self.signals = memory.allocate(SIGNAL_BYTES, timeout_s)
        if _FIRST_EPOCH:
            self._count_from(_FIRST_EPOCH, timeout_s)
        self.block: SymmetricBlock | None = None
        self.retired: list[SymmetricBlock] = []  # outgrown, but CUDA graphs hold their addresses
        self.prepared: dict[tuple[Any, int], Any] = {}  # see `prepare`; ends with the block
        self._kept: list[Any] = []  # prepared things whose device tables CUDA graphs hold
        self.map = WorkspaceMap()
        self.turn = "scatter"  # "nothing" while the attention of a call is being enqueued, or on CPUs computed
        self._turning = threading.Lock()
        self.call = object()  # stands for the call whose q, k, v are here
        self.closed = False
        self._last_stream: torch.cuda.Stream | None = None
        self._last_handle = -1
        self._captured = False
        self.debug = config.debug()  # read anew for each call

    def _count_from(self, epoch: int, timeout_s: float) -> None:
        words = self.signals.peers[self.group.rank].view(torch.int64)
        signed = signed_difference(epoch, 0)
        for first, count in ((EPOCH_WORD, 1), (ARRIVED_WORD, self.group.size), (READY_WORD, self.group.size)):
            words[first : first + count] = signed
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)
        self.group.barrier("first epoch", timeout_s)

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Symmetric bytes held on this rank. torch's memory statistics do not see them on GPUs."""
        blocks = [self.signals, *self.retired, *([self.block] if self.block is not None else [])]
        return 0 if self.closed else sum(block.nbytes for block in blocks)

    def fits(self, shape: ExchangeShape) -> bool:
        return self.block is not None and self.map.grown(shape) == self.map

    def reserve(self, shape: ExchangeShape, timeout_s: float) -> None:
        """Grows the buffers to hold `shape`, if they do not yet. Views of the old buffers end here.

        Collective where it grows; all ranks know the same shapes, so they grow together. A block that a CUDA graph was
        captured with stays until `close`: the graph goes on storing into it.
        """
        if self.fits(shape):
            return
        self.check_turn("scatter")
        if self.memory.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise WorkspaceError(
                    "the workspace cannot grow while a CUDA graph is captured; run the call once before"
                )
            torch.cuda.synchronize(self.memory.device)
        new_map = self.map.grown(shape)
        self._forget_prepared(len(self.prepared))
        if self.block is not None:
            # behind this exchange nobody stores into the old block any more, but for replays of graphs
            if any(self.group.exchange("growth", self._captured, timeout_s)):
                self.retired.append(self.block)
            else:
                self.memory.free(self.block, timeout_s)
            self.block, self._captured = None, False
        try:
            with torch.inference_mode(False):
                self.block = self.memory.allocate(new_map.total_bytes, timeout_s)
        except Exception:
            self.group.plans.clear()  # what was agreed on counted on the old block; calls that fit may still be made
            self.group.settled.clear()
            raise
        self.map = new_map
        for offset, nbytes in self.map.guards():
            self.block.peers[self.group.rank][offset : offset + nbytes] = _GUARD
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)
        self.group.barrier("grown", timeout_s)

    def damaged_guards(self) -> list[int]:
        """Byte offsets of guard regions of this rank that somebody wrote to; empty if all is well."""
        if self.block is None:
            return []
        own = self.block.peers[self.group.rank]
        return [at for at, nbytes in self.map.guards() if bool((own[at : at + nbytes] != _GUARD).any())]

    def address(self, name: str, rank: int) -> int:
        """Where `rank`'s buffer of that name is mapped here."""
        assert self.block is not None
        return self.block.addresses[rank] + self.map.offset(name)

    def _view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert self.block is not None
        numel = 1
        for extent in shape:
            numel *= extent
        start = self.map.offset(name)
        if numel * dtype.itemsize > self.map.capacity(name):
            raise ShapeError(f"{name} of shape {shape} does not fit the workspace's {self.map.capacity(name)} bytes")
        return self.block.peers[rank][start : start + numel * dtype.itemsize].view(dtype).view(shape)

    def head_sharded(self, name: str, rank: int, shape: ExchangeShape, dtype: torch.dtype) -> torch.Tensor:
        """`rank`'s Q as (batch, P * s, h, D), s rows for each chunk, in `rank`'s chunk order, behind a shorter shard
        rows without meaning; or its K or V as (batch, S, h_kv, D), in the order of the sequence."""
        if name == "q":
            rows, heads = shape.num_ranks * shape.local_seq, shape.head_ranges[rank]
        else:
            rows, heads = shape.seq_len, shape.kv_ranges[rank]
        return self._view(name, rank, (shape.batch, rows, len(heads), shape.head_dim), dtype)

    def output(self, rank: int, shape: ExchangeShape, dtype: torch.dtype) -> torch.Tensor:
        """`rank`'s O as (batch, s, H, D), s rows of which it owns the first shape.rows(rank)."""
        return self._view("o", rank, (shape.batch, shape.local_seq, shape.num_heads, shape.head_dim), dtype)

    def lse(self, rank: int, shape: ExchangeShape) -> torch.Tensor:
        """`rank`'s LSE as (batch, H, s), float32, likewise."""
        return self._view("lse", rank, (shape.batch, shape.num_heads, shape.local_seq), torch.float32)

    def prepare(self, make: Callable[[Plan, Workspace], _Prepared], plan: Plan) -> _Prepared:
        """make(plan, self), made once for each plan: what does not change from call to call, such as views."""
        key = (make, plan.fingerprint)
        if key not in self.prepared:
            self._forget_prepared(len(self.prepared) - _MAX_PREPARED + 1)
            with torch.inference_mode(False):
                self.prepared[key] = make(plan, self)
        found: _Prepared = self.prepared[key]
        return found

    def _forget_prepared(self, count: int) -> None:
        """Drops the oldest; a graph may have captured any of them, so with one they only leave the table."""
        for key in list(self.prepared)[: max(0, count)]:
            found = self.prepared.pop(key)
            if self._captured:
                self._kept.append(found)

    # -- protocol ----------------------------------------------------------------------------------------------------

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
            self._captured = True
            return
        # the handle alone costs the host a tenth of what a Stream does
        handle = torch._C._cuda_getCurrentRawStream(self.memory.device.index)
        if handle == self._last_handle:
            return
        stream = torch.cuda.current_stream(self.memory.device)
        if self._last_stream is not None:
            stream.wait_stream(self._last_stream)
        self._last_stream, self._last_handle = stream, handle

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
        self.prepared.clear()
        self._kept.clear()
        for block in (*self.retired, *([self.block] if self.block is not None else []), self.signals):
            self.memory.free(block, timeout_s)
        self.block, self.retired = None, []
