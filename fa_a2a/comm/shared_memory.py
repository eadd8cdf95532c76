"""Symmetric memory between CPU processes of one host: shared mappings of unnamed files.

Each rank makes a file of its own with a random name and mode 0600 in the shared-memory file system, the others open it,
and the name is removed as soon as all have: nothing is left behind, however a process ends later.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import sys
import tempfile
import time

import torch

from ..errors import UnsupportedError, WorkspaceError
from ..layout import ARRIVED_WORD, EPOCH_WORD, FINGERPRINT_WORD, READY_WORD, SIGNAL_WORDS, Word, signed_difference
from .group import Group, host_identity
from .symmetric import Fault, SymmetricBlock, SymmetricMemory

_U64 = 1 << 64
_WORD_OFFSET = {Word.ARRIVED: ARRIVED_WORD, Word.READY: READY_WORD}


def _memory_fence() -> None:
    """Orders this process's stores before a publication, and its loads after an acquisition.

    x86-64 keeps stores in order and loads in order, so nothing is needed there, and Python gives no other tool.
    Elsewhere: membarrier(2) on Linux, the system library's barrier on macOS.
    """
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        return
    if sys.platform == "darwin":
        ctypes.CDLL(None).OSMemoryBarrier()
        return
    if sys.platform == "linux" and machine == "aarch64":
        membarrier, command_global = 283, 1
        if ctypes.CDLL(None).syscall(membarrier, command_global, 0) == 0:
            return
    raise UnsupportedError(
        "shared-memory signals between CPU processes are ordered on x86-64, and on aarch64 Linux and macOS by a "
        f"barrier call; this is {machine} on {sys.platform}; use exchange='collective'"
    )


def _folder() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _reserve(fd: int, nbytes: int) -> tuple[mmap.mmap | None, str | None]:
    """The file's mapping, or why there is none."""
    try:
        os.ftruncate(fd, nbytes)
        if sys.platform == "linux":
            os.posix_fallocate(fd, 0, nbytes)  # a full file system says so here, not by SIGBUS in a store later
        return _map(os.dup(fd), nbytes), None
    except OSError as error:
        return None, str(error)
    finally:
        os.close(fd)


def _open(sources: list[mmap.mmap | str | None], nbytes: int) -> tuple[list[mmap.mmap], str | None]:
    """Mappings of the peers' files, given by path, among what is mapped already; or why one cannot be opened."""
    try:
        maps = [_map(os.open(s, os.O_RDWR), nbytes) if isinstance(s, str) else s for s in sources]
        return [m for m in maps if m is not None], None
    except OSError as error:
        return [], str(error)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


class SharedMemory(SymmetricMemory):
    """Symmetric memory of a group whose ranks are CPU processes of one host and one user."""

    name = "shared_memory"

    def __init__(self, group: Group, timeout_s: float) -> None:
        self.group = group
        self.device = torch.device("cpu")
        self.positions = tuple(range(group.size))
        self.world = group.size
        _memory_fence()
        hosts = group.exchange("host", host_identity(), timeout_s)
        others = [r for r, host in enumerate(hosts) if host != hosts[0]]
        if others:
            raise UnsupportedError(
                f"shared memory joins processes of one host, and ranks {others} are on another than rank 0; "
                "use exchange='collective'"
            )

    def allocate(self, nbytes: int, timeout_s: float) -> SymmetricBlock:
        path = os.path.join(_folder(), f"fa_a2a-{secrets.token_hex(16)}")
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            own, problem = _reserve(fd, nbytes)
            told = self.group.exchange("shared memory", (path, problem), timeout_s)
            if troubles := [f"rank {r}: {trouble}" for r, (_, trouble) in enumerate(told) if trouble]:
                raise WorkspaceError(
                    f"no {nbytes} bytes of shared memory to be had in {_folder()} ({'; '.join(troubles)}); "
                    "make room there (containers: --shm-size), or use exchange='collective'"
                )
            maps, problem = _open([own if r == self.group.rank else p for r, (p, _) in enumerate(told)], nbytes)
            told = self.group.exchange("shared memory mapped", problem, timeout_s)
            if troubles := [f"rank {r}: {trouble}" for r, trouble in enumerate(told) if trouble]:
                raise UnsupportedError(
                    f"these processes cannot open each other's shared memory ({'; '.join(troubles)}); "
                    "containers must share it (--ipc=host), or use exchange='collective'"
                )
        finally:
            os.unlink(path)
        peers = tuple(torch.frombuffer(m, dtype=torch.uint8) for m in maps)
        return SymmetricBlock(nbytes, peers, tuple(t.data_ptr() for t in peers), maps)

    def free(self, block: SymmetricBlock, timeout_s: float) -> None:
        """Nothing to do: the tensors hold the mappings, and the last one unmaps them."""

    def signal(
        self,
        block: SymmetricBlock,
        word: Word,
        *,
        advance: bool = False,
        publish: bool = False,
        wait: bool = False,
        fingerprint: int = 0,
        timeout_s: float = 30.0,
    ) -> None:
        rank = self.group.rank
        words = [memoryview(m).cast("Q") for m in block.handle]  # type: ignore[attr-defined]
        own = words[rank]
        if advance:
            own[EPOCH_WORD] = (own[EPOCH_WORD] + 1) % _U64
        epoch = own[EPOCH_WORD]
        at = _WORD_OFFSET[word]
        if publish:
            _memory_fence()  # what this rank stored is visible before its number is
            for peer in words:
                if word is Word.ARRIVED:
                    peer[FINGERPRINT_WORD + rank] = fingerprint
                peer[at + rank] = epoch
        if wait:
            self._wait(own, word, epoch, fingerprint, timeout_s)
            _memory_fence()  # what the peers stored is read after their numbers

    def _wait(self, own: memoryview, word: Word, epoch: int, fingerprint: int, timeout_s: float) -> None:
        rank, at = self.group.rank, _WORD_OFFSET[word]
        deadline, spins, pending = time.monotonic() + timeout_s, 0, list(range(self.group.size))
        while True:
            waiting = []
            for peer in pending:  # all in each pass: a mismatch must not hide behind a rank that is merely late
                if signed_difference(own[at + peer], epoch) < 0:
                    waiting.append(peer)
                elif word is Word.ARRIVED and own[FINGERPRINT_WORD + peer] != fingerprint:
                    raise Fault("mismatch", word, rank, peer, epoch, own[at + peer]).error(timeout_s)
            if not (pending := waiting):
                return
            spins += 1
            if time.monotonic() > deadline:
                raise Fault("deadline", word, rank, pending[0], epoch, own[at + pending[0]]).error(timeout_s)
            time.sleep(0 if spins < 200 else 1e-4)

    def fault(self) -> Fault | None:
        return None

    def words(self, block: SymmetricBlock) -> list[int]:
        return list(memoryview(block.handle[self.group.rank]).cast("Q"))[:SIGNAL_WORDS]  # type: ignore[index]
