"""A persistent pool of real processes, one gloo world of P ranks, so that importing torch is paid once."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp


class RankFailure(AssertionError):
    """A rank raised, ended, or did not answer in time."""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, size: int, port: int, pipe: Connection, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    pipe.send(("up", None))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task is None:
            break
        function, kwargs = task
        try:
            pipe.send(("done", function(rank, size, **kwargs)))
        except BaseException as error:
            pipe.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class RankPool:
    """`size` processes. run(f, **kwargs) calls f(rank, size, **kwargs) on each and returns the results."""

    def __init__(self, size: int, environ: dict[str, str] | None = None) -> None:
        context = mp.get_context("spawn")
        self.size, self.broken = size, False
        port = _free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs, environ or {}), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.collect(120)

    def run(self, function: Callable[..., Any], timeout_s: float = 90, **kwargs: Any) -> list[Any]:
        self.start(function, **kwargs)
        return self.collect(timeout_s)

    def start(self, function: Callable[..., Any], **kwargs: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, kwargs))

    def collect(self, timeout_s: float, ranks: list[int] | None = None) -> list[Any]:
        """Every rank's result; RankFailure with all ranks' tracebacks if any failed. Kills the pool on silence."""
        deadline, results, failures = time.monotonic() + timeout_s, [], []
        for rank in range(self.size) if ranks is None else ranks:
            try:
                if not self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                    failures.append(f"rank {rank} did not answer within {timeout_s} s")
                    continue
                kind, value = self.pipes[rank].recv()
            except (EOFError, ConnectionError):
                failures.append(f"rank {rank} ended with exit code {self.processes[rank].exitcode}")
                continue
            if kind == "failed":
                failures.append(f"rank {rank}: {value}")
            results.append(value)
        if failures:
            self.broken = True
            raise RankFailure("\n".join(failures))
        return results

    def stop(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                self.broken = True
        for process in self.processes:
            process.join(0.2 if self.broken else 20)
            if process.is_alive():
                process.kill()
                process.join()
