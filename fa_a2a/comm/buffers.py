"""The memory of a workspace: one Q, K, V, O and LSE on every rank, grow-only, between guards; views of them, and what
is made of the views once for each plan. Who may touch them when is the protocol's part (workspace.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import ShapeError, WorkspaceError
from ..layout import ExchangeShape, WorkspaceMap, chunk_owners
from .symmetric import SymmetricBlock, SymmetricMemory

if TYPE_CHECKING:
    from typing import Self

    from ..ops.plan import Plan
    from .group import Group

_GUARD = 0xA5
_MAX_PREPARED = 128
_Prepared = TypeVar("_Prepared")


class Buffers:
    """Of one group. Made by every rank of the group together; so is every growth and `free`."""

    def __init__(self, group: Group, memory: SymmetricMemory) -> None:
        self.group, self.memory = group, memory
        self.owners = chunk_owners(group.rank, memory.positions, memory.world)
        orders = [chunk_owners(r, memory.positions, memory.world) for r in range(group.size)]
        self.my_chunk_at = tuple(order.index(group.rank) for order in orders)  # where my queries lie in each peer's Q
        self.block: SymmetricBlock | None = None
        self.retired: list[SymmetricBlock] = []  # outgrown, but CUDA graphs hold their addresses
        self.captured = False  # by a CUDA graph, which holds the block's addresses
        self.prepared: dict[tuple[Any, int], Any] = {}  # see `prepare`; ends with the block
        self._kept: list[Any] = []  # prepared things whose device tables CUDA graphs hold
        self.map = WorkspaceMap()

    @property
    def blocks(self) -> list[SymmetricBlock]:
        """All that is held, the outgrown ones too."""
        return [*self.retired, *([self.block] if self.block is not None else [])]

    def fits(self, shape: ExchangeShape) -> bool:
        return self.block is not None and self.map.grown(shape) == self.map

    def grow(self, shape: ExchangeShape, timeout_s: float) -> None:
        """Makes the buffers hold `shape`, too. Views of the old buffers end here.

        Collective; all ranks know the same shapes, so they grow together. A block that a CUDA graph was captured with
        stays until `free`: the graph goes on storing into it.
        """
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
            if any(self.group.exchange("growth", self.captured, timeout_s)):
                self.retired.append(self.block)
            else:
                self.memory.free(self.block, timeout_s)
            self.block, self.captured = None, False
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

    def free(self, timeout_s: float) -> None:
        """Collective. Nobody stores any more: the caller has seen to it."""
        self.prepared.clear()
        self._kept.clear()
        for block in self.blocks:
            self.memory.free(block, timeout_s)
        self.block, self.retired = None, []

    # -- guards ------------------------------------------------------------------------------------------------------

    def damaged_guards(self) -> list[int]:
        """Byte offsets of guard regions of this rank that somebody wrote to; empty if all is well."""
        if self.block is None:
            return []
        own = self.block.peers[self.group.rank]
        return [at for at, nbytes in self.map.guards() if bool((own[at : at + nbytes] != _GUARD).any())]

    # -- views -------------------------------------------------------------------------------------------------------

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

    def prepare(self, make: Callable[[Plan, Self], _Prepared], plan: Plan) -> _Prepared:
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
            if self.captured:
                self._kept.append(found)
