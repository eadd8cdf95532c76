"""Symmetric memory between CPU processes of one host: shared mappings of files in memory, private to the user.

Each rank makes a file of its own with mode 0600, the others map it, and then nothing but the mappings holds it: it ends
with the last process, however that ends.
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
from ..layout import (
    ARRIVED_WORD,
    EPOCH_WORD,
    FINGERPRINT_WORD,
    READY_WORD,
    SIGNAL_WORDS,
    TOLD_WORD,
    Notice,
    Reason,
    Word,
    signed_difference,
)
from .group import Group, by_rank, host_identity
from .symmetric import Fault, SymmetricBlock, SymmetricMemory

_U64 = 1 << 64
_WORD_OFFSET = {Word.ARRIVED: ARRIVED_WORD, Word.READY: READY_WORD}


def _memory_fence() -> None:
    """Orders this process's stores before a publication, and its loads after an acquisition.

    Whoever publishes (one aligned 8-byte store) has stored the data before in the same thread, or in threads of torch
    that have handed over to it; whoever waits reads the word, then the data. x86-64 keeps stores in order and loads in
    order, so nothing is needed there: no compiler stands between two calls of Python, and a copy that goes past the
    caches ends with a fence of its own. Reads before a publication (`ready` promises that they are over) cannot move
    behind it either: x86-64 moves no store before an older load. tests/multiprocess/test_ordering.py has the test.
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


def _create() -> tuple[int, str, str | None]:
    """A new file: its descriptor, where peers find it, and its name, if it had to have one.

    Linux: a file that never has a name. Peers reach it through this process's entry in /proc, which the kernel opens to
    processes of the same user only; nothing is left behind even if every rank is killed while it is being shared.
    Elsewhere: a file with a random name, removed as soon as all have mapped it.
    """
    if hasattr(os, "memfd_create") and os.path.isdir(f"/proc/{os.getpid()}/fd"):
        fd = os.memfd_create("fa_a2a", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        return fd, f"/proc/{os.getpid()}/fd/{fd}", None
    path = os.path.join(_folder(), f"fa_a2a-{secrets.token_hex(16)}")
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), path, path


def _folder() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _identity(fd: int) -> list[int]:
    """Which file this is: a path through /proc could name another one if its process ended meanwhile."""
    status = os.fstat(fd)
    return [status.st_dev, status.st_ino]


def _reserve(fd: int, nbytes: int) -> tuple[mmap.mmap | None, str | None]:
    """The file's mapping, or why there is none."""
    try:
        os.ftruncate(fd, nbytes)
        if sys.platform == "linux":
            os.posix_fallocate(fd, 0, nbytes)  # no room is said here, not by SIGBUS in a store later
        return _map(fd, nbytes), None
    except OSError as error:
        return None, str(error)


def _open(path: str, identity: list[int], nbytes: int) -> mmap.mmap:
    """The mapping of a peer's file."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _identity(fd) != identity:
            raise OSError(f"{path} is another file by now")
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


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
        fd, path, name, own, identity = -1, "", None, None, [0, 0]
        try:
            try:
                fd, path, name = _create()
                own, problem = _reserve(fd, nbytes)
                identity = _identity(fd)
            except OSError as error:
                problem = str(error)
            told = self.group.exchange("shared memory", (path, identity, problem), timeout_s)
            if troubles := by_rank(trouble for _, _, trouble in told):
                raise WorkspaceError(
                    f"no {nbytes} bytes of shared memory to be had ({troubles}); "
                    "free memory or raise this process's limits, or use exchange='collective'"
                )
            maps, problem = [], None
            try:
                maps = [own if r == self.group.rank else _open(p, i, nbytes) for r, (p, i, _) in enumerate(told)]
            except OSError as error:
                problem = str(error)
            told = self.group.exchange("shared memory mapped", problem, timeout_s)
            if troubles := by_rank(told):
                raise UnsupportedError(
                    f"these processes cannot open each other's memory ({troubles}); they must run as one "
                    "user and see each other in /proc (containers: --pid=container:...), or use exchange='collective'"
                )
        finally:
            if fd >= 0:
                os.close(fd)
            if name is not None:
                os.unlink(name)
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
            self._wait(block, own, word, epoch, fingerprint, timeout_s)
            _memory_fence()  # what the peers stored is read after their numbers

    def _wait(
        self, block: SymmetricBlock, own: memoryview, word: Word, epoch: int, fingerprint: int, timeout_s: float
    ) -> None:
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
            notice = Notice.unpacked(own[TOLD_WORD])
            if notice is not None and notice.ends(word, epoch):
                raise Fault.told(notice, word, rank, epoch).error(timeout_s)
            spins += 1
            if time.monotonic() > deadline:
                self.tell(block, rank, Reason.MISSED, pending[0])
                raise Fault("deadline", word, rank, pending[0], epoch, own[at + pending[0]]).error(timeout_s)
            time.sleep(0 if spins < 200 else 1e-4)

    def fault(self) -> Fault | None:
        return None

    def words(self, block: SymmetricBlock) -> list[int]:
        return list(memoryview(block.handle[self.group.rank]).cast("Q"))[:SIGNAL_WORDS]  # type: ignore[index]
