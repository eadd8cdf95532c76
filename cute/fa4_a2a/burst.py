"""Bursts of remote stores, timed: the microbenchmark behind the X-Stage model's numbers.

Every block stores `slices * slice_bytes` bytes in each of `bursts` bursts, and busies itself for a gap behind each.
One kernel for each kind of store; everything else is an argument:

    experiment            slices  gap    flags          what to read
    zero gap, gap sweep   1       0..    0              time of the whole launch
    completion-coupled    1       0..    FENCE | RELEASE_EACH   ISSUE + BEHIND: slowest block of each burst
    the same, unreleased  1       0..    FENCE          time of the whole launch; BEHIND: the fence
    isolated bursts       1       long   RELEASE_EACH   ISSUE: slowest block of each burst
    loads behind a store  1       long   RELEASE_EACH | LOAD    BEHIND: the 16 KiB load
    paced slices          n       long   RELEASE_EACH, with or without LOAD; pace_clocks between slices
    a few waves           1       long   RELEASE_FIRST  ISSUE, summed over bursts
    delay                 0       any    0              nothing; the stream is busy for that long

The local control is the same launch with local addresses in `targets`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, IntFlag

from .cache import load_or_compile

STORES = ("st", "bulk")  # 16-byte st.global; cp.async.bulk, waited for with .read
THREADS = 256
MAX_BURST_BYTES = 128 * 1024  # of one block: the staging of bulk stores
PIECE_BYTES = 16 * 1024  # of one bulk store
LOAD_BYTES = 16 * 1024
CONTROL_WORDS = 2  # int64, zeroed before each launch


class Flags(IntFlag):
    FENCE = 1  # behind each burst: wait for completion and fence.acq_rel.sys
    LOAD = 2  # behind each slice a bulk load of LOAD_BYTES; waited for
    RELEASE_EACH = 4  # all blocks start each burst together
    RELEASE_FIRST = 8  # ... the first burst only


class Summary(IntEnum):
    """int64 words of a block."""

    START_NS = 0  # globaltimer, whose tick may be as coarse as 1 us: only for long spans
    END_NS = 1
    START_CLOCK = 2  # the SM's clock, at the same moments
    END_CLOCK = 3
    ISSUE_CLOCKS = 4  # sum over bursts; gaps, pauses, fences and the wait for a release are not in it
    BURSTS = 5  # done
    ERROR = 6  # Failure


SUMMARY_WORDS = 8


class Failure(IntEnum):
    NONE = 0
    RELEASE = 1  # not every block came to the start of a burst within the deadline
    DEADLINE = 2  # the bursts took longer than the deadline
    LOAD = 3  # a load did not land


def load_burst(arch: str, store: str) -> Callable[..., None]:
    """A callable (targets, summary, issue, behind, control, source, num_ctas, num_targets, bursts, slices, slice_bytes,
    slots, slot_bytes, gap_clocks, pace_clocks, flags, deadline_ns) on torch's current stream.

    targets: int64 CUDA tensor of addresses; burst n of block c goes to targets[(c + n) % num_targets] + (n % slots) *
    slot_bytes + c * slices * slice_bytes. summary: int64 [num_ctas * SUMMARY_WORDS]. issue, behind: int64
    [bursts * num_ctas], clocks by burst, then block; behind is 0 without FENCE and LOAD. control: int64
    [CONTROL_WORDS], zeroed. source: address of num_ctas * LOAD_BYTES local bytes. num_ctas: at most one for each SM
    (pass the number of SMs): a block takes more than half of an SM's shared memory, so that they lie one on each.
    slice_bytes: a multiple of 16, slices * slice_bytes at most MAX_BURST_BYTES. Clocks: cycles of an SM.

    Every loop ends at deadline_ns after the block's start, or 0.1 s after a load's issue: the block says why in
    ERROR and leaves; it never traps.
    """
    if store not in STORES:
        raise ValueError(f"a burst's store is one of {', '.join(STORES)}, not {store!r}")

    def build() -> object:
        from .burst_kernels import compile_burst

        return compile_burst(arch, store)

    return load_or_compile(f"burst-{store}-{arch}", {"arch": arch, "store": store}, build)
