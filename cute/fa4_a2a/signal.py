"""Publishing and awaiting epochs across the ranks of a group: one block of 32 threads, one thread per peer.

A rank's signal block is BLOCK_WORDS u64 words in symmetric memory, zero at the start, never reset:

    word                    written by                        read by
    EPOCH            0      this rank (ADVANCE)               this rank                  its own call counter
    TOLD             1      any rank that makes no further    this rank, WAIT            a notice, packed; 0 for none
                            step, its host or its kernel
    ARRIVED + src   32..    rank src, PUBLISH of ARRIVED      this rank, WAIT            src's q, k, v are here, or src
                                                                                       sends them (overlap.py)
    FINGERPRINT+src 64..    rank src, before ARRIVED          this rank, after ARRIVED   src's configuration
    READY + src     96..    rank src, PUBLISH of READY        this rank, WAIT            src's part of my output is here
    PARTS + 8*src   128..   rank src, overlap_send.py         this rank, overlap_wait.py part i of src's q, k, v is here
          + i

The other words are unused. A notice: a reason (Told) in bits 0 and 1, the rank that gives it in 8 to 15, the rank it
missed in 16 to 23, and from 24 on the low 40 bits of the first step it will not make, a step being 2 * epoch + Word.

The orders that make it safe stand in signal_kernel.py, the protocol in fa_a2a/comm/workspace.py, and fa_a2a/layout.py
has the same words for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, IntFlag

from .cache import load_or_compile

MAX_RANKS = 32
EPOCH, TOLD, ARRIVED, FINGERPRINT, READY = 0, 1, 32, 64, 96  # word offsets
PARTS, MAX_PARTS = 128, 8  # of an exchange that arrives part by part, see overlap.py
BLOCK_WORDS = PARTS + MAX_RANKS * MAX_PARTS
BLOCK_BYTES = 8 * BLOCK_WORDS
RECORD_WORDS = 8  # int64


class Word(IntEnum):
    ARRIVED = 0
    READY = 1


class Flags(IntFlag):
    ADVANCE = 1  # own epoch += 1, before anything else
    PUBLISH = 2  # store the epoch to every rank of the group
    WAIT = 4  # until every rank's word has reached the epoch


class Failure(IntEnum):
    NONE = 0
    DEADLINE = 1
    FINGERPRINT = 2
    TOLD = 3  # a peer has said that it makes no further step


class Told(IntEnum):
    FAILED = 1
    MISSED = 2  # a peer, until its deadline


class Record(IntEnum):
    """Fields of the pinned host record. CODE is written last; zero it before use. After a failure the kernel traps: the
    process's CUDA context is gone and the record is what is left."""

    CODE = 0  # Failure
    WORD = 1
    RANK = 2
    PEER = 3
    EXPECTED_EPOCH = 4
    FOUND_EPOCH = 5
    EXPECTED_FINGERPRINT = 6
    FOUND_FINGERPRINT = 7  # 0 where it was not looked at: READY, or the epoch never came; with TOLD the notice


def load_signal(arch: str) -> Callable[..., None]:
    """A callable (peer_blocks, rank, num_ranks, word, flags, fingerprint, deadline_ns, record) on torch's current
    stream.

    peer_blocks: int64 CUDA tensor [num_ranks], where each group rank's signal block is mapped here, own included. rank:
    own index in the group. word: Word. flags: Flags. fingerprint: signed 64-bit, used with ARRIVED only. deadline_ns:
    how long WAIT may take, from the kernel's start. record: device-visible address of RECORD_WORDS int64 in pinned
    memory. The epoch comes from device memory: in a CUDA graph every replay is a new call. With more than one of the
    flags the order is ADVANCE, PUBLISH, WAIT. With none of them it only reads the own epoch: a launch to load the
    kernel by, which CUDA may not do while a stream is captured.
    """

    def build() -> object:
        from .signal_kernel import compile_signal

        return compile_signal(arch)

    return load_or_compile(f"signal-{arch}", {"arch": arch}, build)
