"""The kernel behind overlap.load_overlap. Imports cutlass and flash-attn-4: only to compile.

The persistent kernel (persistent_kernels.py) with another order of tiles, a load warp that waits for peers
(overlap_wait.py) and two sending warps (overlap_send.py). No body of upstream's is repeated. Warps of the producer
group: 0 loads, 1 lets O out and ends the call, 2 and 3 send. Named barrier 13 joins the senders to warp 1 at the end.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from .forward import Tile
from .forward_kernels import attention_arguments, sm90_options
from .overlap_schedule import Overlap, OverlapParams, SplitOrder
from .overlap_send import Sends
from .overlap_wait import Waits
from .persistent import Build, Order
from .persistent_entry import publication_arguments
from .persistent_kernels import PersistentForward
from .persistent_schedule import Params, TileOrder
from .toolchain import DTYPES, bshd, compile_for, vector


class OverlapForward(Waits, Sends, PersistentForward):
    def accept(
        self,
        order: Int32,
        q_in: cute.Tensor,
        k_in: cute.Tensor,
        v_in: cute.Tensor,
        steps: cute.Tensor,
        sources: cute.Tensor,
        counters: cute.Tensor,
        send_pace_ns: Int32,
        kv_parts: Int32,
        own_rows: Int32,
        fingerprint: Int64,
    ) -> tuple[Any, Any]:
        """order: how many of the own chunk's tiles come first."""
        self.inputs = (q_in, k_in, v_in)
        self.sends = (order, steps, sources, counters, send_pace_ns, kv_parts, own_rows, fingerprint)
        return Int32(int(Order.OWN_FIRST)), None

    def schedule(self, params: Params) -> tuple[Params, type[TileOrder]]:
        own_first, steps, sources, counters, send_pace_ns, kv_parts, own_rows, fingerprint = self.sends
        rank, keys = params.release.rank, params.rows * params.num_chunks
        atoms = [
            self.own_atom(x, params, rank, keys, tile, layout, shift)
            for x, tile, layout, shift in zip(
                self.inputs,
                (self.tile_m, self.tile_n, self.tile_n),
                (self.sQ_layout, self.sK_layout, self.sV_layout),
                (Int32(0), keys - params.rows, keys - params.rows),
            )
        ]
        size = self.dtype.width // 8
        overlap = Overlap(
            own_first,
            steps,
            sources,
            counters,
            send_pace_ns,
            cute.ceil_div(params.num_heads, kv_parts),
            kv_parts,
            own_rows,
            fingerprint,
            *(x.iterator.toint() for x in self.inputs),
            *(size * Int64(x.stride[1]) for x in self.inputs),
            *(size * Int64(x.stride[2]) for x in self.inputs),
            *atoms,
            keys,
        )
        fields = {name: getattr(params, name) for name in Params.__dataclass_fields__}
        return OverlapParams(**fields, overlap=overlap), SplitOrder

    def own_atom(
        self, x: cute.Tensor, params: Params, rank: Int32, keys: Int32, tile: int, layout: Any, shift: Int32
    ) -> cute.CopyAtom:
        """Loads this rank's heads of an input as if its rows lay `shift` rows on, where the workspace's tensor has
        them. Rows before that are not there, and not asked for."""
        by_row, by_head = (cute.assume(Int64(x.stride[i]), divby=8) for i in (1, 2))
        offset = rank * params.num_heads * by_head - shift * by_row
        at = x.iterator.toint() + (self.dtype.width // 8) * offset
        pointer = cute.make_ptr(self.dtype, at, cute.AddressSpace.gmem, assumed_align=16)
        shape = (shift + params.rows, self.tile_hdim, params.num_heads, params.num_chunks)
        view = cute.make_tensor(pointer, cute.make_layout(shape, stride=(by_row, 1, by_head, Int64(0))))
        atom, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), view, cute.select(layout, mode=[0, 1]), (tile, self.tile_hdim)
        )
        return atom


def compile_overlap(head_dim: int, dtype: str, arch: str, tile: Tile, with_lse: bool, build: Build) -> Any:
    attention = attention_arguments(dtype, head_dim, with_lse)
    rows, all_heads = attention[0].shape[1], cute.sym_int32()
    inputs = [bshd(DTYPES[dtype], 1, rows, all_heads, head_dim) for _ in range(3)]
    tables = [vector(Int64) for _ in range(3)]
    i32, i64 = Int32(0), Int64(0)
    own = (*inputs, *tables, i32, i32, i32, i64)
    make = lambda: OverlapForward(build, **sm90_options(dtype, head_dim, tile))
    return compile_for(arch, make, *attention, i32, i32, i32, *own, *publication_arguments(build))
