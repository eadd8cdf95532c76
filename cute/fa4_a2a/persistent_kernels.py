"""The kernel behind persistent.load_persistent. Imports cutlass and flash-attn-4: only to compile.

By subclassing, with none of upstream's bodies repeated: its loops over tiles and keys, its loads and its softmax stay.
What is replaced is the scheduler and the grid (`kernel`), shared memory (room for O), the epilogue, and what the idle
producer warps do after `load`.

Named barriers (0 is sync_threads, 1 to 6 are upstream's), one pair for each consumer warpgroup w, or FULL + 0 and
EMPTY + 0 for all of them together:

    barrier     arrive                  wait                    meaning
    FULL + w    warpgroup w, 128        the storing warp, 32    w's rows are staged and visible to bulk copies, and
                                                                w's LSE is stored
    EMPTY + w   the storing warp, 32    warpgroup w, 128        the slices before have been read: w may write

The storing warp is a producer warp. Where a consumer warp stores (a control), both are barriers among consumers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from flash_attn.cute import utils
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler
from quack import layout_utils

from .forward import Tile
from .forward_kernels import attention_arguments, sm90_options, sm100_options
from .persistent import Build, Stamp
from .persistent_entry import Entry, publication_arguments
from .persistent_schedule import Launch, Params, TileOrder, scheduler
from .persistent_sm100 import PersistentForwardSm100
from .persistent_steps import Steps
from .persistent_stores import EMPTY, FULL
from .toolchain import compile_for, vector


class PersistentForward(Entry, Steps, FlashAttentionForwardSm90):
    upstream, target = FlashAttentionForwardSm90, "sm_90a"

    def _setup_attributes(self) -> None:
        super()._setup_attributes()
        if self.build.registers is not None:  # upstream has just set them
            self.num_mma_regs, self.num_producer_regs = self.build.registers

    def _get_shared_storage_cls(self) -> Any:
        """Upstream's storage, in which the last buffer, for P, is O's staging: P stays in registers here."""
        assert self.sP_layout is None
        assert not self.Q_in_regs
        self.sP_layout = self.sO_layout
        storage = super()._get_shared_storage_cls()
        self.sP_layout = None
        self.staging_at = cute.cosize(self.sQ_layout) + cute.cosize(self.sK_layout)  # behind sQ and sK, in elements
        return storage

    def kernel(self, *arguments: Any) -> Launch:
        changed = list(arguments)
        at = next(i for i, a in enumerate(changed) if a is SingleTileScheduler)
        params = Params.create(changed[at - 1], *self.rest_of_params)
        changed[at - 1], changed[at] = self.schedule(params)
        return Launch(super().kernel(*changed), (cutlass.min(self.grid_sms, params.tiles), Int32(1), Int32(1)))

    def schedule(self, params: Params) -> tuple[Params, type[TileOrder]]:
        """What rides in the scheduler's params, and the scheduler."""
        return params, TileOrder

    @cute.jit
    def mma(self, *arguments):
        self.params = scheduler(arguments)().params  # the epilogue is handed none
        FlashAttentionForwardSm90.mma(self, *arguments)
        if const_expr(self.build.store == "consumer"):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def epilogue(
        self,
        acc_O: cute.Tensor,
        lse: cute.Tensor,
        mO,
        mLSE,
        sO: cute.Tensor,
        seqlen,
        gmem_tiled_copy_O,
        tma_atom_O,
        tiled_mma: cute.TiledMma,
        tidx: Int32,
        m_block: Int32,
        head: Int32,
        chunk: Int32,
    ):
        rounded = cute.make_fragment_like(acc_O, self.dtype)
        rounded.store(acc_O.load().to(self.dtype))
        atom = utils.get_smem_store_atom(90, self.dtype)
        copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(tidx)
        staging = cute.make_tensor(sO.iterator + self.staging_at, sO.layout)
        place = (m_block, head, chunk)
        group = utils.canonical_warp_group_idx(sync=False) - 1
        self.stamp_of_group(Stamp.WANTED, place, group, tidx)
        if const_expr(self.build.store == "consumer"):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.consumer_store_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.consumers_sync(EMPTY)
        else:
            self.group_sync(EMPTY, group)
        self.stamp_of_group(Stamp.GOT, place, group, tidx)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(staging))
        if const_expr(mLSE is not None):
            self.store_lse(lse, mLSE[None, head, chunk], tiled_mma, tidx, m_block, seqlen.seqlen_q)
        cute.arch.fence_view_async_shared()
        if const_expr(self.build.store == "consumer"):
            self.consumers_sync(FULL)
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.consumer_store_warp:
                self.send_all(self.params, self.slices_of(sO), place)
        else:
            self.group_arrive(FULL, group)

    @cute.jit
    def store_lse(self, lse, gLSE: cute.Tensor, tiled_mma: cute.TiledMma, tidx: Int32, m_block: Int32, rows: Int32):
        """One ordinary store for each row, by the thread that holds column 0 of it."""
        places = cute.make_identity_tensor((self.tile_m, self.tile_hdimv))
        mine = layout_utils.reshape_acc_to_mn(tiled_mma.get_slice(tidx).partition_C(places))
        if mine[0, 0][1] == 0:
            for m in cutlass.range_constexpr(cute.size(lse)):
                row = m_block * self.tile_m + mine[m, 0][0]
                if row < rows:
                    gLSE[row] = lse[m]


def compile_persistent(
    head_dim: int, dtype: str, arch: str, tile: Tile, with_lse: bool, heads_per_kv: int, build: Build
) -> Any:
    def make() -> Any:
        if arch == "sm_100a":
            return PersistentForwardSm100(build, **sm100_options(head_dim, tile, heads_per_kv))
        return PersistentForward(build, **sm90_options(dtype, head_dim, tile, heads_per_kv))

    attention, i32 = attention_arguments(dtype, head_dim, with_lse, heads_per_kv), Int32(0)
    stamps = vector(Int64) if build.stamps else None
    return compile_for(arch, make, *attention, i32, i32, i32, stamps, *publication_arguments(build))
