"""The persistent kernel for sm_100. Compiled and its instructions looked at; run on no GPU yet.

flash-attn-4's sm_100 forward is persistent already: O has staging of its own, two buffers of 128 rows a CTA, and a warp
of its own (`epilogue_s2g`) that stores them while the next tile is computed. By subclassing, with none of upstream's
bodies repeated, three things are replaced:

  the scheduler   tiles in the sequence that Order names, and a grid whose size is an argument (upstream asks the
                  driver while tracing). With D = 128 two CTAs work as a pair on 2 * 256 rows: its tile is theirs.
  that warp       sends the buffers in slices with a pause between them; a CTA's last tile leaves at once.
  its end         publishes `ready`, if asked for: persistent_release.py.

Why the release may follow there. Of the chain in persistent_release.py only step 2 is another one here, since upstream
hands a buffer over (mbarriers, `pipeline_o_epi`) *before* it stores the LSE of its rows:
  O     the warp waits for every buffer of every tile, and issues all bulk stores itself.
  LSE   the correction warps arrive at named barrier STORED behind their last tile, LSE included (`correction_loop`);
        the warp waits there. 1 to 10 are upstream's.
  Q, K, V   a buffer is handed over after the last product of its tile, which came after all of the tile's loads, those
        of the pair's other CTA included, had arrived in shared memory; nothing is loaded ahead of the last tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

from . import ptx
from .persistent import Build
from .persistent_entry import Entry
from .persistent_release import publish
from .persistent_schedule import Params, TileOrder
from .persistent_slices import COLUMNS
from .persistent_stores import WARP

STORED = 11  # named barrier: see above


class PairOrder(TileOrder):
    """TileOrder for CTAs that work in pairs: both take the same tile."""

    @classmethod
    def create(cls, params: Params, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> PairOrder:
        return cls(params, cute.arch.cluster_idx()[0], loc=loc, ip=ip)

    def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> Any:
        self._tile_idx += cute.arch.cluster_dim()[0]  # clusters of the grid
        return self.get_current_work()


class Extents(NamedTuple):
    num_block: Any
    num_head: Any
    num_batch: Any


class Schedule:
    """In the place of a scheduler class, for what upstream asks of it: params and grid of the launch, and in the kernel
    a scheduler."""

    def __init__(self, kernel: PersistentForwardSm100):
        self._kernel, self._ctas = kernel, kernel.cta_group_size

    def to_underlying_arguments(self, arguments: Any, *, scheduling_mode: Any) -> Params:
        blocks = cute.ceil_div(arguments.num_block, self._ctas)
        return Params.create(Extents(blocks, arguments.num_head, arguments.num_batch), *self._kernel.rest_of_params)

    def get_grid_shape(self, params: Params) -> tuple[Any, Any, Any]:
        clusters = cutlass.min(cutlass.max(self._kernel.grid_sms // self._ctas, 1), params.tiles)
        return clusters * self._ctas, Int32(1), Int32(1)

    def create(self, params: Params) -> TileOrder:
        return (TileOrder if self._ctas == 1 else PairOrder).create(params)


class PersistentForwardSm100(Entry, FlashAttentionForwardSm100):
    upstream, target = FlashAttentionForwardSm100, "sm_100a"

    def __init__(self, build: Build, **options: Any):
        super().__init__(build, **options)
        self.TileScheduler = Schedule(self)

    def correction_loop(self, *arguments: Any, **options: Any) -> None:
        FlashAttentionForwardSm100.correction_loop(self, *arguments, **options)
        if self.build.release:
            cute.arch.sync_warp()  # behind stores of some lanes
            cute.arch.barrier_arrive(barrier_id=STORED, number_of_threads=self.stored_threads)

    @property
    def stored_threads(self) -> int:
        return WARP * len((*self.correction_warp_ids, *self.epilogue_warp_ids))

    # -- slices --------------------------------------------------------------------------------------------------------

    @property
    def num_slices(self) -> int:
        """Of one buffer; a tile has q_stage times as many."""
        return self.m_block_size // self.build.slice_rows

    def first_slice(self, m_block: Any, buffer: Any, cta_of_pair: Any) -> Any:
        """Where a buffer's rows begin in their chunk, in slices. In a tile the CTAs' first buffers come before the
        second ones."""
        return ((m_block * self.q_stage + buffer) * self.cta_group_size + cta_of_pair) * self.num_slices

    @cute.jit
    def send(self, params: Params, sO: cute.Tensor, target: cute.Tensor, first: Int32, buffer: Int32, number: Int32):
        """Bulk stores of one slice, as one group. target: O of the tile's head and chunk. In a buffer, as in
        slice_layout, a row of a column block is 128 bytes and 8 rows are a swizzle atom; a slice begins on one."""
        for column in cutlass.range_constexpr(self.head_dim_v_padded // COLUMNS):
            here = cute.local_tile(sO[None, None, buffer], self.slice_shape, (number, column))
            there = cute.local_tile(target, self.slice_shape, (first + number, column))
            self.store_slice(params, here, there)
        cute.arch.cp_async_bulk_commit_group()

    # -- the epilogue warp ---------------------------------------------------------------------------------------------

    @cute.jit
    def epilogue_s2g(
        self,
        mO,
        sO: cute.Tensor,
        gmem_tiled_copy_O,
        tma_atom_O,
        pipeline_o_epi,
        pipeline_load_epi,
        block_info,
        num_splits,
        SeqlenInfoCls,
        cta_of_pair=0,
        blocksparse_tensors=None,
        tile_scheduler=None,
    ):
        params = tile_scheduler.params
        cpasync.prefetch_descriptor(params.o_atom)
        phase = Int32(0)
        work = tile_scheduler.initial_work_tile_info()
        while work.is_valid_tile:
            m_block, head, chunk, _ = work.tile_idx
            target = params.o_slices[None, None, head, chunk]
            work = tile_scheduler.advance_to_next_work()
            pace_ns = params.pace_ns
            if not work.is_valid_tile:  # nothing is computed behind the last tile: let it go at once
                pace_ns = Int32(0)
            begin = Int64(0)
            for buffer in cutlass.range(self.q_stage, unroll=1):
                pipeline_o_epi.consumer_wait_w_index_phase(buffer, phase)
                if buffer == 0 and const_expr(self.build.pace == "clock"):
                    begin = ptx.globaltimer()
                first = self.first_slice(m_block, buffer, cta_of_pair)
                filled = cute.ceil_div(params.rows, self.build.slice_rows) - first  # 0 or less behind a chunk's end
                for number in cutlass.range(cutlass.min(filled, self.num_slices), unroll=1):
                    sent = buffer * self.num_slices + number
                    if pace_ns > 0 and sent > 0:
                        self.pause(begin, sent - 1, pace_ns)
                    self.send(params, sO, target, first, buffer, number)
                if work.is_valid_tile:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    pipeline_o_epi.consumer_release_w_index(buffer)
            phase ^= 1
        # of the last tile both buffers are on their way before either is waited for
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        for buffer in cutlass.range(self.q_stage, unroll=1):
            pipeline_o_epi.consumer_release_w_index(buffer)
        if const_expr(self.build.release):
            cute.arch.barrier(barrier_id=STORED, number_of_threads=self.stored_threads)
            publish(params.release)
