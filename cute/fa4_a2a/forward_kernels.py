"""The kernels behind forward.load_forward, and what every kernel made of flash-attn-4's is built and compiled with.

Imports cutlass and flash-attn-4: only to compile.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
from flash_attn.cute.tile_scheduler import StaticPersistentTileScheduler
from flash_attn.cute.utils import AuxData

from .forward import SM100_ROW_TILES, Tile
from .toolchain import DTYPES, bshd, compile_for


class DenseForward:
    """Upstream's launch with nothing but the six arguments that dense attention has."""

    def __init__(self, kernel: Any, arch: str):
        self.kernel, self.options = kernel, left_out(arch)

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse, scale: Float32, stream):
        self.kernel(q, k, v, o, lse, scale, *self.options, stream)


def compile_forward(
    head_dim: int, dtype: str, arch: str, num_sms: int, tile: Tile, with_lse: bool, heads_per_kv: int, causal: bool
) -> Any:
    def make() -> DenseForward:
        if arch == "sm_90a":
            kernel = FlashAttentionForwardSm90(**sm90_options(dtype, head_dim, tile, heads_per_kv, causal))
        else:
            kernel = FlashAttentionForwardSm100(**sm100_options(head_dim, tile, heads_per_kv))
            kernel.TileScheduler = _given_sms(num_sms)
        return DenseForward(kernel, arch)

    return compile_for(arch, make, *attention_arguments(dtype, head_dim, with_lse, heads_per_kv))


def left_out(arch: str) -> tuple[Any, ...]:
    """The options of upstream's __call__, between scale and stream, that dense attention does without."""
    before, after = {"sm_90a": (9, 2), "sm_100a": (10, 8)}[arch]
    return (*(None,) * before, AuxData(), *(None,) * after)


def attention_arguments(dtype: str, head_dim: int, with_lse: bool, heads_per_kv: int = 1) -> tuple[Any, ...]:
    """Placeholders for (q, k, v, o, lse, scale). Extents that must agree are shared: the launch compares them."""
    chunks, rows, keys, heads = (cute.sym_int32() for _ in range(4))
    heads_kv = heads if heads_per_kv == 1 else cute.sym_int32()
    element = DTYPES[dtype]
    q, o = (bshd(element, chunks, rows, heads, head_dim) for _ in range(2))
    k, v = (bshd(element, chunks, keys, heads_kv, head_dim) for _ in range(2))
    lse = None
    if with_lse:
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        lse = make_fake_tensor(Float32, (chunks, heads, rows), strides, assumed_align=4)
    return q, k, v, o, lse, Float32(1.0)


def sm90_options(dtype: str, head_dim: int, tile: Tile, heads_per_kv: int = 1, causal: bool = False) -> dict[str, Any]:
    return {
        "dtype": DTYPES[dtype],
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "qhead_per_kvhead": heads_per_kv,
        "is_causal": causal,
        "is_local": False,
        "pack_gqa": False,
        "tile_m": tile.rows,
        "tile_n": tile.keys,
        "num_stages": 2,
        "num_threads": (tile.rows // 64 + 1) * 128,
        "Q_in_regs": False,
        "intra_wg_overlap": True,
        "mma_pv_is_rs": head_dim != 96,  # upstream's choice: P in registers spills beside 192 rows of 96
    }


def sm100_options(head_dim: int, tile: Tile, heads_per_kv: int = 1) -> dict[str, Any]:
    return {
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "qhead_per_kvhead": heads_per_kv,
        "is_causal": False,
        "is_local": False,
        "pack_gqa": False,
        "m_block_size": tile.rows,
        "n_block_size": tile.keys,
        "q_stage": SM100_ROW_TILES,
        "is_static_persistent": True,
        "use_2cta_instrs": head_dim == 128,  # upstream's choice for dense attention: D = 128 only
    }


def _given_sms(num_sms: int) -> type[StaticPersistentTileScheduler]:
    """Upstream asks the driver for the number of SMs while tracing; here it is told."""

    class GivenSms(StaticPersistentTileScheduler):
        @staticmethod
        def get_grid_shape(params: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any, Any]:
            ctas = num_sms // params.cluster_shape_m * params.cluster_shape_m
            return cutlass.min(ctas, params.total_blocks_cluster * params.cluster_shape_m), Int32(1), Int32(1)

    return GivenSms
