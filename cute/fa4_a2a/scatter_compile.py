"""Compiling the kernels of scatter.load_scatter. Imports cutlass."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from .scatter import NormRope
from .scatter_bulk import BulkScatter
from .scatter_kernel import StoreScatter
from .toolchain import DTYPES, bshd, compile_for, vector

_DTYPES = {**DTYPES, "float32": cutlass.Float32}


def compile_scatter(
    head_dim: int,
    dtype: str,
    arch: str,
    path: str,
    norm_rope: NormRope | None,
    threads: int,
    unroll: int,
    stages: int,
    stage_bytes: int,
) -> Any:
    element = DTYPES[dtype]
    batch, rows, heads = (cute.sym_int32() for _ in range(3))  # shared: the launch compares equal extents
    qkv = [bshd(element, batch, rows, heads, head_dim) for _ in range(3)]
    weights, tables = [None, None], [None, None]
    if norm_rope is not None and norm_rope.norm:
        weight = _DTYPES[norm_rope.weight_dtype]
        weights = [make_fake_tensor(weight, (head_dim,), (1,), assumed_align=16) for _ in range(2)]
    if norm_rope is not None and norm_rope.rope:
        width = head_dim // 2 if norm_rope.pairs else head_dim
        table = _DTYPES[norm_rope.table_dtype]
        tables = [
            make_fake_tensor(table, (rows, width), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
            for _ in range(2)
        ]
    if path == "st":
        make = lambda: StoreScatter(element, head_dim, threads, unroll, norm_rope)
    else:
        make = lambda: BulkScatter(element, head_dim, threads, stages, stage_bytes)
    i32, i64, words = Int32(0), Int64(0), [vector(Int64) for _ in range(3)]
    scalars = (Float32(0.0), i32, i32, i32, i32, i32, i64, i64, i64)
    return compile_for(arch, make, *qkv, *words, *weights, *tables, *scalars)
