"""Ranks for a benchmark: torchrun's where it started this process, else processes of our own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..errors import ConfigurationError


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main() -> bool:
    """Whether this process speaks for the run: rank 0 under torchrun, or the one that starts the ranks."""
    return os.environ.get("RANK", "0") == "0"


def join(rank: int, size: int, kind: str, init_method: str = "env://") -> torch.device:
    """Joins this process to the default group and selects its device."""
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=init_method, rank=rank, world_size=size, device_id=device
        )
        return device
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    return torch.device("cpu")


def run(body: Callable[..., None], ranks: int, kind: str, *arguments: Any) -> None:
    """Runs body(device, *arguments) on `ranks` ranks and returns when all have ended. Raises what a rank raised."""
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigurationError(f"{ranks} ranks need {ranks} GPUs, this machine has {torch.cuda.device_count()}")
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if size != ranks:
            raise ConfigurationError(f"torchrun started {size} ranks and --ranks asks for {ranks}; leave --ranks out")
        _body(int(os.environ["RANK"]), size, kind, "env://", body, arguments)
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_body, (ranks, kind, f"tcp://127.0.0.1:{port}", body, arguments), nprocs=ranks)


def _body(
    rank: int, size: int, kind: str, init_method: str, body: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    device = join(rank, size, kind, init_method)
    try:
        body(device, *arguments)
        from ..lifecycle import close

        close()
    finally:
        dist.destroy_process_group()
