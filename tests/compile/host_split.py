"""overlap_schedule.locate as a function on this CPU (its own file: the DSL reads the source of what it compiles)."""

from functools import lru_cache

import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute import FastDivmodDivisorV2
from cutlass.cute.runtime import from_dlpack
from fa4_a2a.overlap_schedule import locate
from fa4_a2a.persistent_schedule import Params


@cute.jit
def _list(out: cute.Tensor, blocks: Int32, heads: Int32, chunks: Int32, own_first: Int32):
    tiles = blocks * heads * chunks
    by_block, by_head = FastDivmodDivisorV2(blocks), FastDivmodDivisorV2(heads)
    zero = Int32(0)
    params = Params(by_block, by_head, tiles, blocks, heads, chunks, zero, zero, zero, None, None, None, None)
    for tile in range(tiles):
        block, head, chunk = locate(params, own_first, tile)
        out[tile, 0], out[tile, 1], out[tile, 2] = chunk, head, block


@lru_cache(maxsize=1)
def _compiled():
    return cute.compile(_list, from_dlpack(torch.zeros(4096, 3, dtype=torch.int32)), *(Int32(1),) * 4)


def places(blocks, heads, chunks, own_first):
    """(chunk, head, row block) of each tile, in the kernel's order."""
    out = torch.full((4096, 3), -1, dtype=torch.int32)
    _compiled()(from_dlpack(out), *(Int32(n) for n in (blocks, heads, chunks, own_first)))
    return [tuple(x) for x in out[: blocks * heads * chunks].tolist()]
