"""From the command's options to cases, and from their results to what a person reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from .. import config
from ..errors import ConfigurationError, ShapeError, UnsupportedError
from ..layout import MAX_RANKS, ExchangeShape
from ..ops import kernels
from ..xstage import convergence
from . import checks, forecast, progress, record, table
from .launch import under_torchrun
from .plot_parts import draw_newest
from .sweep import Case, measure

if TYPE_CHECKING:
    from . import exchange_methods

Row = TypeVar("Row", Case, "exchange_methods.Case")


def rank_counts(asked: list[int] | None, kind: str, *, timed: bool = True) -> list[int]:
    """Each once. Raises ConfigurationError for one that cannot be had, or that has nothing to exchange.

    timed: ranks that share a GPU (FA_A2A_SHARE_GPU) will not do."""
    if under_torchrun():
        counts = asked or [int(os.environ["WORLD_SIZE"])]
    elif asked:
        counts = checks.unique(asked)
        shared = not timed and config.share_gpu()
        if kind == "cuda" and max(counts) > (gpus := torch.cuda.device_count()) and not shared:
            raise ConfigurationError(f"{max(counts)} ranks need {max(counts)} GPUs, this machine has {gpus}")
    else:
        counts = [2, 4] if kind == "cpu" else [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]
        if not counts:
            raise ConfigurationError(
                "this measures several GPUs, and the machine has one; sweep, dit and soak also take --device cpu"
            )
    if min(counts) < 2:
        raise ConfigurationError(f"one rank has nothing to exchange: --ranks must be at least 2, got {min(counts)}")
    if max(counts) > MAX_RANKS:
        raise ConfigurationError(f"--ranks must be at most {MAX_RANKS}, which a group has at most, got {max(counts)}")
    return counts


def rows_by_ranks(rows: list[Row], counts: list[int], chosen_heads: bool) -> dict[int, list[Row]]:
    """The rows of each number of ranks. Raises ShapeError for one that the library would refuse.

    chosen_heads: the user named the heads. Of the default ones, those that do not divide over the ranks are left out.
    """
    found = {}
    for count in counts:
        fitting = [row for row in rows if row.num_heads % count == 0]
        found[count] = rows if chosen_heads or not fitting else fitting
        for row in found[count]:
            _check_equal(row, count)
    return found


def _check_equal(row: Row, count: int) -> None:
    """What is compared has equal parts: the bench's own exchanges and views know no others."""
    for what, number, way in (
        ("tokens", row.seq_len, "pad the sequence"),
        ("heads", row.num_heads, "use a number of ranks that divides the heads"),
    ):
        if number % count:
            raise ShapeError(f"the commands measure equal shards: {number} {what} over {count} ranks; {way}")
    ExchangeShape(row.batch, row.seq_len, row.num_heads, row.head_dim, count, 1)


def cases(options: argparse.Namespace, kind: str) -> list[Case]:
    """The sweep's rows. Raises ConfigurationError for options that no row can have."""
    gpu = kind == "cuda"
    kernel = options.kernel if options.kernel != "auto" else ("fa4" if gpu else "cpu")
    if kernel not in ("fa4", "fa3", "cpu"):
        rule = "--kernel must be auto, or fa4, fa3 or cpu, which store to their peers"
        raise ConfigurationError(f"{rule}; got {kernel!r}")
    if (kernel == "cpu") == gpu:
        raise ConfigurationError(f"kernel {kernel!r} does not run on device {kind!r}; leave one of the two options out")
    for name in ("batch", "rounds", "head_dim"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    head_dim, dtype = options.head_dim or (128 if gpu else 64), options.dtype or ("bfloat16" if gpu else "float32")
    if head_dim % 8:
        raise ShapeError(f"head_dim must be a multiple of 8, got {head_dim}; pad the heads")
    if trouble := kernels.problem(kernel, torch.device(kind, 0), getattr(torch, dtype), head_dim, False):
        raise UnsupportedError(trouble)
    return [
        Case(
            seq_len=seq_len,
            num_heads=heads,
            head_dim=head_dim,
            batch=options.batch,
            dtype=dtype,
            kernel=kernel,
            rounds=options.rounds or (12 if gpu else 3),
            profile=options.profile,
        )
        for heads in checks.unique(options.heads or ([24, 12] if gpu else [8]))
        for seq_len in checks.unique(options.seq_lens or ([4608, 8192, 16384, 32768] if gpu else [256, 512, 1024]))
    ]


def sweep_body(device: torch.device, rows: list[Case], out: Path) -> None:
    """What each rank runs. Rank 0 shows the progress and writes the lines."""
    main = dist.get_rank() == 0
    ranks = dist.get_world_size()
    if main:
        name = record.device_name(device)
        print(f"\n{ranks} ranks on {name}\n{table.sweep_header(name)}", flush=True)

    def measured(row: Case, tick: progress.Tick) -> list[progress.Line]:
        return [measure(row, device, tick, forecast.written_down(row, ranks, device, out if main else None))]

    progress.run(rows, partial(title, ranks), measured, partial(map, table.sweep_row), out, main=main)


def title(num_ranks: int, row: Case) -> str:
    return f"P={num_ranks} S={row.seq_len} H={row.num_heads}"


CPU_NOTE = "CPU processes: a check that fused equals serial, bit by bit; their times say nothing of GPUs."


def show(out: Path, plot_path: Path, since: int = 0, preview: Iterable[str] = ()) -> None:
    """The end of a sweep. since: lines that the file held before it; preview: text for a machine without GPUs."""
    lines = record.read(out)
    if not lines:  # /dev/null and the like
        return
    if lines[-1]["device"] == "CPU":
        print("\nus per call, median over rounds of the slowest rank; FA: attention alone.")
        print("\n".join(preview))
    else:
        print(
            "\nus per call, median over rounds of the slowest rank. E_res: fused minus attention alone; cost: fused "
            "minus\nthe same kernel with local stores, =clock: if the SMs' clock had been that one's; sender: the "
            "kernel's end,\nready: all tiles of all peers are here; pred.: X-Stage's cost for the profile named in "
            "the lines."
        )
    for text in convergence.report(line for line in lines[since:] if line.get("kind") == "sweep"):
        print(text)
    from ..plot import sweep

    draw_newest(lines, out, plot_path, sweep)
