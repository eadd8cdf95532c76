"""Where flash-attn-4 on sm_100 stages O, and what a slice's bulk store reads (its own file: the DSL reads source)."""

import cutlass.cute as cute
import torch
from cutlass import Constexpr
from cutlass.cute.runtime import from_dlpack
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils.blackwell_helpers import make_smem_layout_epi
from fa4_a2a.persistent_slices import COLUMNS

BUFFERS, ROWS = 2, 128


@cute.jit
def _list(staged: cute.Tensor, sliced: cute.Tensor, kernel: Constexpr):
    columns = staged.shape[2]
    buffers = make_smem_layout_epi(kernel.dtype, LayoutEnum.ROW_MAJOR, (ROWS, columns), BUFFERS)
    one = kernel.slice_layout()
    kernel.swizzles = (str(buffers.inner), str(one.inner))
    for buffer in range(BUFFERS):
        for row in range(ROWS):
            for column in range(columns):
                staged[buffer, row, column] = cute.crd2idx((row, column, buffer), buffers.outer)
    for row in range(kernel.build.slice_rows):
        for column in range(COLUMNS):
            sliced[row, column] = cute.crd2idx((row, column), one.outer)


def offsets(kernel, head_dim):
    """In elements and before swizzling: of each element of the buffers, and of a slice. Notes both swizzles."""
    staged = torch.full((BUFFERS, ROWS, head_dim), -1, dtype=torch.int32)
    sliced = torch.full((kernel.build.slice_rows, COLUMNS), -1, dtype=torch.int32)
    views = [from_dlpack(t) for t in (staged, sliced)]
    cute.compile(_list, *views, kernel)(*views)
    return staged, sliced
