"""The tiles' order of the overlapped kernel, and what rides in its scheduler's params."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from flash_attn.cute.tile_scheduler import WorkTileInfo
from quack.cute_dsl_utils import ParamsBase

from .persistent_schedule import Params, TileOrder


@dataclass
class Overlap(ParamsBase):
    """inputs: addresses of q, k, v, then their steps over rows and over heads in bytes. The atoms read q, k and v in
    the places of their chunk in the workspace's tensors."""

    own_first: Int32
    steps: cute.Tensor
    sources: cute.Tensor
    counters: cute.Tensor
    send_pace_ns: Int32
    group_heads: Int32
    kv_parts: Int32
    own_rows: Int32
    fingerprint: Int64
    at_q: Int64
    at_k: Int64
    at_v: Int64
    row_q: Int64
    row_k: Int64
    row_v: Int64
    head_q: Int64
    head_k: Int64
    head_v: Int64
    q_atom: cute.CopyAtom
    k_atom: cute.CopyAtom
    v_atom: cute.CopyAtom
    keys: Int32


@dataclass
class OverlapParams(Params):
    overlap: Overlap | None


class SplitOrder(TileOrder):
    """own_first tiles of the own chunk, which need nothing of a peer to begin with; the peers' chunks; the rest of the
    own one, which stores locally while the last remote tiles drain."""

    def get_current_work(self, *, loc: Any = None, ip: Any = None) -> WorkTileInfo:
        block, head, chunk = locate(self.params, self.params.overlap.own_first, self._tile_idx)
        return WorkTileInfo((block, head, chunk, Int32(0)), self._tile_idx < self.params.tiles)


@cute.jit
def locate(params: Params, own_first: Int32, tile: Int32):
    """(row block, head, chunk) of a place in the sequence."""
    of_chunk = params.num_blocks * params.num_heads
    first = cutlass.min(own_first, of_chunk)
    remote = params.tiles - of_chunk
    number = tile  # among the tiles chunk by chunk
    if tile >= first:
        number = tile - first + of_chunk
        if tile >= first + remote:
            number = tile - remote
    pair, block = divmod(number, params.blocks)
    chunk, head = divmod(pair, params.minor)
    return Int32(block), Int32(head), Int32(chunk)
