"""Ranks for a benchmark: torchrun's where it started this process, else processes of our own."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from ..errors import ConfigurationError


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main() -> bool:
    """Whether this process speaks for the run: rank 0 under torchrun, or the one that starts the ranks."""
    return os.environ.get("RANK", "0") == "0"


def join(rank: int, size: int, kind: str, port: int | None = None) -> torch.device:
    """Joins this process to the default group and selects its device. port: of a store on this host, or None for
    the address in the environment, as torchrun sets it."""
    limit = timedelta(seconds=300)
    store = None if port is None else dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, device_id=device)
        return device
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return torch.device("cpu")


def run(body: Callable[..., None], ranks: int, kind: str, *arguments: Any) -> None:
    """Runs body(device, *arguments) on `ranks` ranks and returns when all have ended. Raises what a rank raised."""
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigurationError(f"{ranks} ranks need {ranks} GPUs, this machine has {torch.cuda.device_count()}")
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if size != ranks:
            raise ConfigurationError(f"torchrun started {size} ranks and --ranks asks for {ranks}; leave --ranks out")
        _body(int(os.environ["RANK"]), size, kind, None, body, arguments)
        return
    # The store lives here, on a port the system chose: no rank has to bind one that may be taken meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    spawn(_body, (ranks, kind, store.port, body, arguments), nprocs=ranks)  # type: ignore[no-untyped-call]


def _body(
    rank: int, size: int, kind: str, port: int | None, body: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    device = join(rank, size, kind, port)
    try:
        body(device, *arguments)
        from ..lifecycle import close

        close()
    finally:
        dist.destroy_process_group()
