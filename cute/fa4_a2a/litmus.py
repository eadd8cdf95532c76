"""Litmus test: is a flag that follows bulk stores to a peer seen only after their data?

Rank 0 writes DATA_BYTES into rank 1's memory from CTAS blocks, then a flag; blocks of rank 1 that acquire the flag
compare every 4-byte word with the value of the round. A word still of the round before is stale: the flag overtook the
data.

    variant       after its stores a block       arrival among blocks   last block, before the flag
    release       bulk wait (complete)           acq_rel.gpu            fence.acq_rel.sys      <- what own kernels do
    read_fence    bulk wait .read (source read)  acq_rel.gpu            fence.acq_rel.sys
    control       bulk wait .read                relaxed                nothing                <- must be able to fail
    st_control    st.global instead of bulk      relaxed                nothing
    st_release    st.global                      acq_rel.gpu            fence.acq_rel.sys      <- what scatter does
    boundary      bulk wait .read, kernel ends   -                      signal kernel: fence   <- what stock kernels do

A variant is sound as far as tested if it shows 0 stale words in a run in which a control shows some. Those above read
by loads past L1. Readers that use bulk copies, which go through another proxy, behind writers that are sound:

    variant            writer      the reader, between its acquire and its bulk copies
    bulk_read          st_release  fence.proxy.async by the thread that acquired and copies
    bulk_read_control  st_release  nothing                                           <- should be able to fail
    call               boundary    the end of the signal kernel that acquired        <- what attention does with q, k, v

Every reader also tests the other direction: it announces the end of its reading by the same chain, and words of the
round after, which are counted as wrong, would mean that the writer came too early.

Driving all but boundary and call: two ranks with peer access.
  data: DATA_BYTES of rank 1's memory, zeroed. flag: u64 of rank 1's, 0. ack: u64 of rank 0's, 0. Each is passed as an
  address in the space of the rank that launches. counters: int64 CUDA tensor of len(Counter), zeroed, one on each rank.
    rank 0:  litmus.write(data_at_peer, flag_at_peer, ack_own, counters, rounds, deadline_ns)
    rank 1:  litmus.read(data_own, flag_own, ack_at_peer, counters, rounds, deadline_ns)
  in any order, once each; all rounds run inside the two launches. Then synchronize and look at the counters.

Driving boundary: the same data and counters, both ranks with their signal blocks (signal.load_signal), for n = 1, 2,
...:
    rank 0:  litmus.write(data_at_peer, n, counters);  signal(..., READY, ADVANCE | PUBLISH | WAIT, ...)
    rank 1:  litmus.read(data_own, ready_word, n, n, counters, deadline_ns);  the same signal call
  ready_word: address of rank 1's own READY + 0 word, so the read kernel itself spins on what rank 0's signal kernel
  publishes; 0 skips the spin (for a wait done by an earlier kernel). It takes the epoch and then the value to expect;
  they are equal as long as the signal blocks started at 0 with the data. Rank 1's signal call is what lets rank 0
  overwrite.

Driving call, with the signal blocks as words of a call: both ranks signal(..., ARRIVED, ADVANCE | PUBLISH | WAIT, ...)
and later signal(..., READY, PUBLISH | WAIT, ...); rank 0 writes before the first, rank 1 reads between the two, with
ready_word 0.

Every spin ends at deadline_ns after its kernel's start: the block sets ERROR = 1 and leaves. CTAS blocks must be
resident together, so nothing else may fill the GPUs. Do not reuse counters, flag and ack without zeroing all of them on
both ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from .cache import load_or_compile

CTAS = 64
BYTES_PER_CTA = 32 * 1024
DATA_BYTES = CTAS * BYTES_PER_CTA
VARIANTS = {  # variant -> writing kernel, reading kernel
    "release": ("release", "rounds"),
    "read_fence": ("read_fence", "rounds"),
    "control": ("control", "rounds"),
    "st_control": ("st_control", "rounds"),
    "st_release": ("st_release", "rounds"),
    "boundary": ("boundary", "boundary"),
    "bulk_read": ("st_release", "rounds-bulk"),
    "bulk_read_control": ("st_release", "rounds-bare"),
    "call": ("boundary", "boundary-bare"),
}


class Counter(IntEnum):
    ARRIVALS = 0  # blocks that finished a round, over all rounds
    ERROR = 1  # 1: a deadline passed
    STALE = 2  # 4-byte words that held the value of the round before
    WRONG = 3  # 4-byte words that held anything else: a bug of the test or of the machine
    STALE_BLOCKS = 4  # (block, round) pairs that saw a stale word
    ROUNDS = 5  # rounds completed; boundary: of the read kernel


class Litmus(NamedTuple):
    write: Callable[..., None]
    read: Callable[..., None]


def load_litmus(arch: str, variant: str) -> Litmus:
    """The two kernels of a variant; how to drive them is said above. They run on torch's current stream."""
    if variant not in VARIANTS:
        raise ValueError(f"litmus variant is one of {', '.join(VARIANTS)}, not {variant!r}")
    writer, reader = VARIANTS[variant]

    def write() -> object:
        from .litmus_kernels import compile_writer

        return compile_writer(arch, writer)

    def read() -> object:
        from .litmus_readers import compile_reader

        return compile_reader(arch, reader)

    return Litmus(
        load_or_compile(f"litmus-write-{writer}-{arch}", {"arch": arch, "variant": writer}, write),
        load_or_compile(f"litmus-read-{reader}-{arch}", {"arch": arch, "variant": reader}, read),
    )
