"""Index algebra of the exchange: who owns what, in which order, and where it lies. No torch, no devices.

Shape suffixes: B batch, S tokens of the whole sequence, s tokens of one rank, H heads, h heads of one rank, D head
dimension, P ranks; s = S/P and h = H/P where they divide, and sharding.py says what they are otherwise. Layout of
tensors is always (batch, seq, heads, head_dim).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from .sharding import MAX_RANKS as MAX_RANKS
from .sharding import ExchangeShape as ExchangeShape

GUARD_BYTES = 1024  # untouched bytes around every buffer of a workspace
ALIGN_BYTES = 1024  # TMA needs 16; whole 1 KiB steps keep every buffer's swizzle atoms aligned
MAX_TMA_STRIDE_BYTES = 1 << 40  # a tensor map holds strides below 2^40, in multiples of 16 bytes


def chunk_owners(rank: int, positions: Sequence[int], world: int) -> tuple[int, ...]:
    """Owner of each chunk, in the order in which `rank` finds its peers in memory.

    positions: place of each group rank among the `world` mappings (its PE); own heap first, then the next place, and
    around. Chunk 0 is always the own one. For a group that is the whole world this is (rank + c) mod P.
    """
    here = positions[rank]
    return tuple(sorted(range(len(positions)), key=lambda p: (positions[p] - here) % world))


@dataclass(frozen=True)
class Run:
    """Consecutive chunks whose buffers lie one equal stride apart: one launch of a kernel that takes strides."""

    start: int
    length: int
    stride_bytes: int


def equal_stride_runs(addresses: Sequence[int]) -> tuple[Run, ...]:
    """Splits chunks, given the address of each one's buffer, into the fewest launches (greedy, left to right).

    A stride that a tensor map cannot hold (not a positive multiple of 16 bytes below 2^40) ends the run.
    """
    runs: list[Run] = []
    start = 0
    while start < len(addresses):
        length, stride = 1, 0
        if start + 1 < len(addresses):
            stride = addresses[start + 1] - addresses[start]
            if 0 < stride < MAX_TMA_STRIDE_BYTES and stride % 16 == 0:
                length = 2
                while start + length < len(addresses):
                    if addresses[start + length] - addresses[start + length - 1] != stride:
                        break
                    length += 1
        runs.append(Run(start, length, stride if length > 1 else 0))
        start += length
    return tuple(runs)


@dataclass(frozen=True)
class Tile:
    """`rows` query rows of one head of one chunk, from `row` on."""

    chunk: int
    head: int
    row: int
    rows: int


def tile_order(num_chunks: int, num_heads: int, rows: int, tile_rows: int) -> Iterator[Tile]:
    """Tiles chunk by chunk and head by head; chunk 0, the own one, comes last, so that the end of the kernel stores
    locally while the last remote stores drain."""
    for c in range(num_chunks):
        chunk = (c + 1) % num_chunks
        for head in range(num_heads):
            for row in range(0, rows, tile_rows):
                yield Tile(chunk, head, row, min(tile_rows, rows - row))


class Word(IntEnum):
    """Which of a rank's monotone words a publication or a wait is about."""

    ARRIVED = 0  # src's q, k, v of call n are in my buffers
    READY = 1  # src's part of my output of call n is in my buffers, and src has stopped reading what I sent


# Signal block of one rank, in u64 words; the kernels know the same offsets. Written by peers but for EPOCH.
EPOCH_WORD = 0
TOLD_WORD = 1  # 0, or a Notice: of the rank that wrote last, if several did
ARRIVED_WORD = 32
FINGERPRINT_WORD = 64
READY_WORD = 96
PARTS_WORD = 128
MAX_PARTS = 8  # of one rank's q, k, v, where they arrive part by part
SIGNAL_WORDS = PARTS_WORD + MAX_RANKS * MAX_PARTS
SIGNAL_BYTES = SIGNAL_WORDS * 8


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Reason(IntEnum):
    """Why a rank makes no further step."""

    FAILED = 1  # it raised an error, or was interrupted
    MISSED = 2  # it gave up waiting for `missing`


_STEP_BITS = 40


@dataclass(frozen=True)
class Notice:
    """What a rank that makes no further step tells its peers, in one u64: 2 bits of reason, rank in bits 8 to 15,
    missing in 16 to 23, from 24 on the low bits of the first step that will not come: 2 * epoch + Word."""

    reason: Reason
    rank: int
    missing: int
    step: int

    def packed(self) -> int:
        low = self.step % (1 << _STEP_BITS)
        return self.reason | self.rank << 8 | self.missing << 16 | low << 24

    @staticmethod
    def unpacked(word: int) -> Notice | None:
        """None for 0, which no notice is."""
        if word == 0:
            return None
        return Notice(Reason(word & 3), word >> 8 & 255, word >> 16 & 255, word >> 24 & (1 << _STEP_BITS) - 1)

    def ends(self, word: Word, epoch: int) -> bool:
        """Whether a wait for that word of that call waits for what will not come. Earlier steps still do."""
        half = 1 << _STEP_BITS - 1
        return (2 * epoch + word - self.step + half) % (1 << _STEP_BITS) - half >= 0


def next_step(arrived: Any, ready: Any) -> Any:
    """The first step that a rank has not published, by the last epochs it has: `arrived` is at most one ahead.
    Integers, or tensors of them."""
    return arrived + ready + 2


BUFFER_NAMES = ("q", "k", "v", "o", "lse")


@dataclass(frozen=True)
class WorkspaceMap:
    """Byte map of a workspace's symmetric data block: guard, Q, guard, K, guard, V, guard, O, guard, LSE, guard.

    Every rank has the same map: capacities are those of the rank that needs most. Q and O take `tensor_bytes`, K and V,
    which have fewer heads in grouped-query attention, `kv_bytes`.
    """

    tensor_bytes: int = 0
    kv_bytes: int = 0
    lse_bytes: int = 0

    def grown(self, shape: ExchangeShape) -> WorkspaceMap:
        """The smallest map that holds this one's buffers and `shape`'s."""
        return WorkspaceMap(
            max(self.tensor_bytes, aligned(shape.tensor_bytes)),
            max(self.kv_bytes, aligned(shape.kv_bytes)),
            max(self.lse_bytes, aligned(shape.lse_bytes)),
        )

    def capacity(self, name: str) -> int:
        return {"lse": self.lse_bytes, "k": self.kv_bytes, "v": self.kv_bytes}.get(name, self.tensor_bytes)

    def offset(self, name: str) -> int:
        before = BUFFER_NAMES[: BUFFER_NAMES.index(name)]
        return GUARD_BYTES + sum(self.capacity(other) + GUARD_BYTES for other in before)

    def guards(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of every guard region."""
        ends = [self.offset(name) + self.capacity(name) for name in BUFFER_NAMES]
        return ((0, GUARD_BYTES), *((end, GUARD_BYTES) for end in ends))

    @property
    def total_bytes(self) -> int:
        return self.offset("lse") + self.lse_bytes + GUARD_BYTES


def signed_difference(a: int, b: int) -> int:
    """a - b for 64-bit counters that may wrap: how epochs are compared."""
    half = 1 << 63
    return (a - b + half) % (1 << 64) - half


def fingerprint(text: str) -> int:
    """63-bit hash of a call's configuration; never 0 (unset) and never negative."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1 | 1
