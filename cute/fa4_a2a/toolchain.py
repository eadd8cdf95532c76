"""Compiling for a named architecture, on any machine. Imports cutlass: only for modules that define kernels.

The DSL reads the architecture from CUTE_DSL_ARCH once, or asks the driver; kernels ask it again while they are built
(flash-attn-4 in its constructors). `target` says it for the time of one compile, whatever the machine holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import CuTeDSL

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


@contextmanager
def target(arch: str) -> Iterator[None]:
    settings = CuTeDSL._get_dsl().envar
    before = settings._arch  # not .arch: reading that would ask the driver and keep the answer
    settings.arch = arch
    try:
        yield
    finally:
        settings._arch = before


def compile_for(arch: str, make_kernel: Callable[[], Any], *arguments: Any) -> Any:
    """Compiles with the tvm-ffi calling convention. The stream comes last in every kernel and is left out of its calls:
    it is the caller's current torch stream."""
    with target(arch):
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(make_kernel(), *arguments, stream, options=f"--enable-tvm-ffi --gpu-arch {arch}")


def bshd(dtype: type, batch: Any, seq: Any, heads: Any, head_dim: int) -> Any:
    """A placeholder for (batch, seq, heads, head_dim): every stride but the last is open, 16-byte steps. A batch stride
    may be 0 (expand) or the distance between two peers (above 2^32)."""
    strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    return make_fake_tensor(dtype, (batch, seq, heads, head_dim), (*strides, 1), assumed_align=16)


def vector(dtype: type) -> Any:
    """A placeholder for a contiguous one-dimensional tensor."""
    return make_fake_tensor(dtype, (cute.sym_int32(),), (1,), assumed_align=dtype.width // 8)
