"""Ranks for a benchmark: torchrun's where it started this process, else processes of our own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from .. import config
from ..errors import ConfigurationError, FaA2AError, PeerError
from . import interrupt, rank_process, shared_gpu

_POLL_S = 0.1  # how soon a signal is heeded
_GRACE_S = 0.8  # between a request to end and the kill
_EXIT_S = 30.0  # for a rank that is done: its libraries' own clean-up


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
        local, count = int(os.environ.get("LOCAL_RANK", rank)), torch.cuda.device_count()
        shared = config.share_gpu() and count < size
        device = torch.device("cuda", local % count if shared else local)
        torch.cuda.set_device(device)
        if shared:
            shared_gpu.mend_gloo()
            # named so, a DeviceMesh over all ranks takes this group, and makes none of its own
            dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=size, timeout=limit)
        else:
            dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, device_id=device)
        return device
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return torch.device("cpu")


def run(body: Callable[..., None], ranks: int, kind: str, *arguments: Any, timed: bool = True) -> None:
    """Runs body(device, *arguments) on `ranks` ranks and returns when all have ended. Raises what a rank raised.

    timed: what it measures would mean nothing on GPUs that ranks share.
    An interrupt or SIGTERM ends all ranks first. The ranks end with this process, however it ends.
    """
    config.check()
    if kind == "cuda" and torch.cuda.device_count() < ranks and (timed or not config.share_gpu()):
        raise ConfigurationError(f"{ranks} ranks need {ranks} GPUs, this machine has {torch.cuda.device_count()}")
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if size != ranks:
            raise ConfigurationError(f"torchrun started {size} ranks and --ranks asks for {ranks}; leave --ranks out")
        _body(int(os.environ["RANK"]), size, kind, None, body, arguments)
        return
    with interrupt.noted() as signals:
        # The store lives here, on a port the system chose: no rank has to bind one that may be taken meanwhile.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        team = _Team(pickle.dumps((_body, (ranks, kind, store.port, body, arguments))))
        try:
            team.start(ranks, signals)
            team.wait(signals)
        finally:
            team.end()
            del store
    interrupt.leave(signals)
    team.raise_failure()


class _Team:
    """The processes of the ranks, and what each reported: None, its error, or the text of a traceback."""

    def __init__(self, work: bytes) -> None:
        self.work = work
        self.processes: list[SpawnProcess] = []
        self.pipes: dict[Connection, int] = {}
        self.failures: dict[int, object] = {}

    def start(self, ranks: int, signals: list[int]) -> None:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # it opens the signals' mask when it starts
        for rank in range(ranks):
            if signals:
                return
            ours, theirs = context.Pipe(duplex=False)
            arguments = (os.getpid(), theirs, self.work, rank)
            process = context.Process(target=rank_process.enter, args=arguments, name=f"rank {rank}")
            with interrupt.held_back():
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes[ours] = rank

    def wait(self, signals: list[int]) -> None:
        """Until all ranks have ended, one has failed, or a signal has come."""
        while self.pipes and not self.failures and not signals:
            self._collect(_POLL_S)
        if self.failures and not signals:  # the others may know better: a lost connection is a failure's consequence
            until = time.monotonic() + _GRACE_S
            while self.pipes and time.monotonic() < until and not signals:
                self._collect(_POLL_S)

    def _collect(self, timeout_s: float) -> None:
        for pipe in wait(list(self.pipes), timeout_s):
            assert isinstance(pipe, Connection)
            rank = self.pipes.pop(pipe)
            try:
                report = pipe.recv()
            except EOFError:
                self.processes[rank].join(_GRACE_S)
                report = PeerError(f"rank {rank} ended with {_exit_text(self.processes[rank].exitcode)}")
            if report is not None:
                self.failures[rank] = report

    def end(self) -> None:
        """Waits for ranks that are done; asks the others to end, then kills them."""
        patience = _EXIT_S if not self.pipes and not self.failures else 0.0
        for process in self.processes:
            process.join(patience)
        for step in ("terminate", "kill"):
            for process in self.processes:
                if process.is_alive():
                    getattr(process, step)()
            until = time.monotonic() + _GRACE_S
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))

    def raise_failure(self) -> None:
        """The failure that explains most: an error of the library that is not about a peer, before the others."""
        if not self.failures:
            return

        def order(rank: int) -> tuple[bool, bool]:
            report = self.failures[rank]
            return not isinstance(report, Exception), isinstance(report, PeerError)

        rank = min(sorted(self.failures), key=order)
        report = self.failures[rank]
        if isinstance(report, Exception):
            raise report
        raise FaA2AError(f"rank {rank} failed:\n{report}")


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}; SIGKILL may mean that memory ran out"
    return f"exit code {code} and no report"


def _body(
    rank: int, size: int, kind: str, port: int | None, body: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which a killed process leaves behind
    device = join(rank, size, kind, port)
    try:
        body(device, *arguments)
        from ..lifecycle import close

        close()
    finally:
        if sys.exc_info()[0] is None or port is None:  # one that fails does not wait for the others
            dist.destroy_process_group()
