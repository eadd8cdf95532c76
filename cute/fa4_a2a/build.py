"""Ahead-of-time compile of the default kernels into the cache. Needs no GPU: the result may be carried to one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from .clock import load_clock
from .forward import Tile, alike_tiles, load_forward
from .litmus import VARIANTS, load_litmus
from .overlap import ARCHS as OVERLAP_ARCHS
from .overlap import HEAD_DIM as OVERLAP_HEAD_DIM
from .overlap import load_overlap
from .persistent import Build, load_persistent
from .scatter import load_scatter
from .scatter_unequal import load_unequal
from .signal import load_signal

NUM_SMS = {"sm_90a": 132, "sm_100a": 148}  # H100/H200 SXM, B200


class Built(NamedTuple):
    name: str
    seconds: float  # near 0 where the cache had it


def build_all(
    arch: str,
    num_sms: int | None = None,
    head_dims: Iterable[int] = (64, 128),
    dtypes: Iterable[str] = ("bfloat16", "float16"),
    with_lse: Iterable[bool] = (False, True),
    litmus: bool = False,
    report: Callable[[Built], None] | None = None,
) -> list[Built]:
    """Compiles what is missing, one after the other; `report` is called after each. num_sms must be what load_forward
    will be given on the GPU (it is part of the sm_100 kernels), by default that of the usual card."""
    if arch not in NUM_SMS:
        raise ValueError(f"arch is one of {', '.join(NUM_SMS)}, not {arch!r}")
    sms = NUM_SMS[arch] if num_sms is None else num_sms
    jobs: list[tuple[str, Callable[[], object]]] = [
        (f"signal {arch}", lambda: load_signal(arch)),
        (f"clock {arch}", lambda: load_clock(arch)),  # the benchmarks'
    ]
    for head_dim in head_dims:
        for dtype in dtypes:
            jobs.append((f"scatter {arch} D={head_dim} {dtype}", lambda d=head_dim, t=dtype: load_scatter(d, t, arch)))
            jobs.append((f"scatter {arch} D={head_dim} {dtype} unequal", partial(load_unequal, head_dim, dtype, arch)))
            for lse in with_lse:
                for tile in alike_tiles(head_dim, arch):
                    jobs += _of_tile(arch, sms, head_dim, dtype, tile, lse)
                if arch in OVERLAP_ARCHS and head_dim == OVERLAP_HEAD_DIM:
                    name = f"overlapped layer {arch} D={head_dim} {dtype}{' lse' if lse else ''}"
                    jobs.append((name, lambda d=head_dim, t=dtype, x=lse: load_overlap(d, t, arch, sms, with_lse=x)))
    if litmus:
        jobs += [(f"litmus {variant} {arch}", lambda v=variant: load_litmus(arch, v)) for variant in VARIANTS]
    done = []
    for name, job in jobs:
        start = time.perf_counter()
        job()
        done.append(Built(name, time.perf_counter() - start))
        if report is not None:
            report(done[-1])
    return done


def _of_tile(
    arch: str, num_sms: int, head_dim: int, dtype: str, tile: Tile, lse: bool
) -> list[tuple[str, Callable[[], object]]]:
    """The stock kernel, and that of the fused path: with the release."""
    name = f"{arch} D={head_dim} {dtype} tile {tile.rows}x{tile.keys}{' lse' if lse else ''}"
    common = (head_dim, dtype, arch, num_sms, tile, lse)
    return [
        (f"forward {name}", partial(load_forward, *common)),
        (f"persistent {name}", partial(load_persistent, *common, build=Build(release=True))),
    ]
