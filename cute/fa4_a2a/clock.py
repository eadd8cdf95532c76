"""The SMs' clock between two points of a stream.

A GPU at its power limit lowers its clock, the more the more power a kernel draws: two kernels that take the same cycles
then differ in time. Times of long kernels can be told apart from that only with the clock beside them.
"""

from __future__ import annotations

from collections.abc import Callable

from .cache import load_or_compile

SLOTS = 512  # of a table, one for each SM by its number; numbers may have gaps
WORDS = 2  # int64 of a slot: cycles of the SM, global timer in ns


def load_clock(arch: str) -> Callable[..., None]:
    """A callable (table, num_blocks) on torch's current stream.

    table: int64 CUDA tensor [SLOTS * WORDS], aligned to 16 bytes, zeroed once. Each block writes cycles and time at one
    moment to its SM's slot, both by one store. num_blocks: a few for each SM reach every one while nothing else runs.
    The difference of two launches' tables in cycles over that in ns is the SM's mean clock between them, in GHz.
    """

    def build() -> object:
        from .clock_kernel import compile_clock

        return compile_clock(arch)

    return load_or_compile(f"clock-{arch}", {"arch": arch}, build)
