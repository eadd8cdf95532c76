"""persistent_schedule.locate as a function on this CPU (its own file: the DSL reads the source of what it compiles)."""

from functools import lru_cache

import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute import FastDivmodDivisorV2
from cutlass.cute.runtime import from_dlpack
from fa4_a2a.persistent_schedule import Params, locate, minor_extent


@cute.jit
def _list(out: cute.Tensor, blocks: Int32, heads: Int32, chunks: Int32, order: Int32):
    tiles = blocks * heads * chunks
    by_block, minor = FastDivmodDivisorV2(blocks), FastDivmodDivisorV2(minor_extent(order, heads, chunks))
    params = Params(by_block, minor, tiles, blocks, heads, chunks, order, Int32(0), Int32(0), None, None, None, None)
    for tile in range(tiles):
        block, head, chunk = locate(params, tile)
        out[tile, 0], out[tile, 1], out[tile, 2] = chunk, head, block


@lru_cache(maxsize=1)
def _compiled():
    return cute.compile(_list, from_dlpack(torch.zeros(4096, 3, dtype=torch.int32)), *(Int32(1),) * 4)


def places(blocks, heads, chunks, order):
    """(chunk, head, row block) of each tile, in the kernel's order."""
    out = torch.full((4096, 3), -1, dtype=torch.int32)
    _compiled()(from_dlpack(out), *(Int32(n) for n in (blocks, heads, chunks, int(order))))
    return [tuple(x) for x in out[: blocks * heads * chunks].tolist()]
