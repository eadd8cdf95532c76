"""From the command's options to cases, and from their results to what a person reads."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from ..errors import ConfigurationError, FaA2AError, UnsupportedError
from . import record, table
from .launch import under_torchrun
from .sweep import Case, measure


def rank_counts(asked: list[int] | None, kind: str) -> list[int]:
    if under_torchrun():
        return asked or [int(os.environ["WORLD_SIZE"])]
    if asked:
        return asked
    counts = [2, 4] if kind == "cpu" else [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]
    if not counts:
        raise ConfigurationError("the sweep needs two GPUs or more and this machine has one; use --device cpu")
    return counts


def cases(options: argparse.Namespace, kind: str) -> list[Case]:
    """The sweep's rows. Raises ConfigurationError for options that no row can have."""
    gpu = kind == "cuda"
    kernel = options.kernel if options.kernel != "auto" else ("fa4" if gpu else "cpu")
    if kernel not in ("fa4", "cpu"):
        raise ConfigurationError(f"--kernel must be auto, or fa4 or cpu, which store to their peers; got {kernel!r}")
    if (kernel == "cpu") == gpu:
        raise ConfigurationError(f"kernel {kernel!r} does not run on device {kind!r}; leave one of the two options out")
    for name in ("batch", "rounds", "head_dim"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    return [
        Case(
            seq_len=seq_len,
            num_heads=heads,
            head_dim=options.head_dim or (128 if gpu else 64),
            batch=options.batch,
            dtype=options.dtype or ("bfloat16" if gpu else "float32"),
            kernel=kernel,
            rounds=options.rounds or (12 if gpu else 3),
            profile=options.profile,
        )
        for heads in options.heads or ([24, 12] if gpu else [8])
        for seq_len in options.seq_lens or ([4608, 8192, 16384, 32768] if gpu else [256, 512, 1024])
    ]


def sweep_body(device: torch.device, rows: list[Case], out: Path) -> None:
    """What each rank runs. Rank 0 shows the progress and writes the lines."""
    main = dist.get_rank() == 0
    ranks = dist.get_world_size()
    steps = sum(row.rounds + 1 for row in rows)
    if main:
        print(f"\n{ranks} ranks on {record.device_name(device)}")
        print(table.sweep_header(), flush=True)
    with tqdm(total=steps, disable=not main, leave=False, unit="round", file=sys.stderr) as bar:
        for row in rows:
            bar.set_description(f"P={ranks} S={row.seq_len} H={row.num_heads}")
            line = measure(row, device, bar.update)
            if main:
                record.append(out, [line])
                bar.write(table.sweep_row(line), file=sys.stdout)
                sys.stdout.flush()


def show(out: Path, plot_path: Path) -> None:
    print(
        "\nus per call, median over rounds of the slowest rank. E_res: fused minus attention alone; cost: fused minus\n"
        "the same kernel with local stores; sender: the kernel's end, ready: all tiles of all peers are here; pred.:\n"
        "X-Stage's cost for the profile named in the lines."
    )
    lines = record.read(out)
    if any(line["device"] == "CPU" for line in lines):
        print("CPU times say nothing of GPUs: on CPU processes the sweep checks that fused equals serial, bit by bit.")
    print(f"lines: {out}")
    try:
        from ..plot import sweep

        newest = lines[-1]["device"]
        sweep([line for line in lines if line["device"] == newest], plot_path)
        print(f"plot: {plot_path}")
    except UnsupportedError as error:
        print(f"no plot: {error}")
    except FaA2AError as error:
        print(f"no plot: {error}", file=sys.stderr)
