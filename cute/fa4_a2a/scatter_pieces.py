"""What kernels share whose threads copy rows to peers: 16-byte pieces between registers and memory, and tickets."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx
from .scatter import PIECE_BYTES


def loads(dtype: Any) -> cute.CopyAtom:
    """Copies a piece into registers; it is read once, so it need not stay in L1."""
    return cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(),
        dtype,
        num_bits_per_copy=8 * PIECE_BYTES,
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
    )


def stores(dtype: Any) -> cute.CopyAtom:
    return cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), dtype, num_bits_per_copy=8 * PIECE_BYTES)


def registers(dtype: Any) -> cute.Tensor:
    return cute.make_rmem_tensor(8 * PIECE_BYTES // dtype.width, dtype)


def piece(dtype: Any, where: Int64) -> cute.Tensor:
    pointer = cute.make_ptr(dtype, where, cute.AddressSpace.gmem, assumed_align=PIECE_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(8 * PIECE_BYTES // dtype.width))


@cute.jit
def take(counter: Int64, lane: Int32) -> Int32:
    """The next ticket, in all lanes. Asked for when loads are under way, which come back no sooner."""
    ticket = Int32(0)
    if lane == 0:
        ticket = Int32(ptx.add_relaxed_gpu(counter, Int64(1)))
    return cute.arch.shuffle_sync(ticket, 0)
