"""A slice of a staged tile: its layout, its bulk store, the pause behind it. Mixed into all persistent kernels."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.tensor_utils import LayoutEnum
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned
from quack import copy_utils, layout_utils, sm90_utils

from . import ptx
from .persistent import Build
from .persistent_schedule import Params

COLUMNS = 64  # of a slice: 128 bytes, the swizzle's width
POLL_NS = 200  # between two looks at the clock


@dsl_user_op
def sleep(ns: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """nanosleep for a time known at run time only. Lasts anything from 0 to twice as long."""
    llvm.inline_asm(
        None,
        [Int32(ns).ir_value(loc=loc, ip=ip)],
        "nanosleep.u32 $0;",
        "r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


class Slices:
    build: Build

    @property
    def slice_shape(self) -> tuple[int, int]:
        return self.build.slice_rows, COLUMNS

    def slice_layout(self) -> Any:
        return sm90_utils.make_smem_layout(self.dtype, LayoutEnum.ROW_MAJOR, self.slice_shape, None)

    def make_slices(self, o: cute.Tensor) -> tuple[cute.Tensor, cute.CopyAtom]:
        """O (chunks, rows, heads, D) as (rows, D, heads, chunks) for bulk stores of a slice; rows past a chunk's end
        are clipped."""
        by_rows = layout_utils.select(assume_tensor_aligned(o), [1, 3, 2, 0])
        atom, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), by_rows, self.slice_layout(), self.slice_shape
        )
        return tensor, atom

    def store_slice(self, params: Params, here: cute.Tensor, there: cute.Tensor) -> None:
        """The bulk store of one column block of a slice."""
        copy, _, _ = copy_utils.tma_get_copy_fn(params.o_atom, 0, cute.make_layout(1), here, there, single_stage=True)
        copy()

    @cute.jit
    def pause(self, begin: Int64, number: Int32, pace_ns: Int32):
        if const_expr(self.build.pace == "sleep"):
            sleep(pace_ns)
        else:
            until = begin + Int64(number + 1) * pace_ns
            while ptx.globaltimer() < until:
                sleep(Int32(POLL_NS))
