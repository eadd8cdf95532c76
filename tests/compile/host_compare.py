"""The comparisons of signal_kernel as functions on this CPU. A file of their own: the DSL reads the source of what it
compiles."""

from functools import lru_cache

import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import from_dlpack
from fa4_a2a.signal_kernel import ends, reached


@cute.jit
def _compare(out: cute.Tensor, found: Int64, epoch: Int64):
    out[0] = Int32(reached(found, epoch))


@lru_cache(maxsize=1)
def compare():
    return cute.compile(_compare, from_dlpack(torch.zeros(1, dtype=torch.int32)), Int64(0), Int64(0))


@cute.jit
def _ended(out: cute.Tensor, notice: Int64, epoch: Int64, word: Int32):
    out[0] = Int32(ends(notice, 2 * epoch + Int64(word)))


@lru_cache(maxsize=1)
def _compiled():
    return cute.compile(_ended, from_dlpack(torch.zeros(1, dtype=torch.int32)), Int64(0), Int64(0), Int32(0))


def ended(notice: int, epoch: int, word: int) -> bool:
    """notice, epoch: any 64 bits."""
    out, half = torch.zeros(1, dtype=torch.int32), 1 << 63
    signed = (Int64((x + half) % (2 * half) - half) for x in (notice, epoch))
    _compiled()(from_dlpack(out), *signed, Int32(int(word)))
    return bool(out.item())
