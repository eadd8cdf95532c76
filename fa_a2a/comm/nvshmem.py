"""Symmetric memory between GPUs of one host: NVSHMEM through nvshmem4py's host API.

Groups map into the process's one NVSHMEM world (nvshmem_world.py). A group that is the whole world allocates from
NVSHMEM directly. NVSHMEM's allocation is collective over its world, so sub-groups, which must be able to grow alone,
share an arena that is allocated once and divided by agreement inside the group.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from ..errors import UnsupportedError, WorkspaceError
from ..layout import SIGNAL_WORDS, Notice, Word, aligned
from .group import Group, by_rank, world
from .nvshmem_world import WORLD, initialize, malloc
from .pointer import bytes_at
from .symmetric import Fault, Release, SymmetricBlock, SymmetricMemory

_ADVANCE, _PUBLISH, _WAIT = 1, 2, 4  # flags of the signal kernel
_RECORD_WORDS = 8
_MISMATCH, _TOLD = 2, 3  # codes of a record; a told one has a Notice in its last field


class Nvshmem(SymmetricMemory):
    """Symmetric memory of a group whose ranks each hold one GPU of this host."""

    name = "nvshmem"

    def __init__(self, group: Group, device: torch.device, timeout_s: float) -> None:
        from fa4_a2a.signal import load_signal

        self.group, self.device = group, device
        self.whole_world = group.size == world().size
        initialize(device, timeout_s, with_arena=not self.whole_world)
        from nvshmem import bindings

        problem = None
        try:
            self._signal = load_signal("sm_{}{}a".format(*torch.cuda.get_device_capability(device)))
        except Exception as error:  # this rank's own: told to the others, who would wait for it
            problem = f"{type(error).__name__}: {error}"
        # asked anew for each group: PE numbers last as long as the process, ranks as long as the default group
        told = group.exchange("nvshmem pe", (int(bindings.my_pe()), problem), timeout_s)
        if problems := by_rank(text for _, text in told):
            raise UnsupportedError(f"the signal kernel could not be loaded ({problems})")
        self.positions = tuple(pe for pe, _ in told)
        self.world = WORLD.size
        self._free_what_was_left(timeout_s)
        with torch.inference_mode(False):
            self._record = torch.zeros(_RECORD_WORDS, dtype=torch.int64, pin_memory=True)
            self._counter = torch.zeros(1, dtype=torch.int64, device=device)  # of blocks that have ended
        # read on every call: by ctypes, since a look through torch costs microseconds
        self._fields = (ctypes.c_int64 * _RECORD_WORDS).from_address(self._record.data_ptr())
        self._tables: dict[int, torch.Tensor] = {}

    def allocate(self, nbytes: int, timeout_s: float) -> SymmetricBlock:
        from nvshmem import bindings

        nbytes = aligned(nbytes)
        own, full = 0, None
        try:
            own = malloc(nbytes) if self.whole_world else self._divide(nbytes, timeout_s)
        except WorkspaceError as error:
            full = str(error)
        addresses = tuple(
            own if r == self.group.rank or not own else bindings.ptr(own, self.positions[r])
            for r in range(self.group.size)
        )
        problem = None if all(addresses) else f"no mapping of rank {addresses.index(0)}'s memory"
        ends = self.group.exchange("mappings", (full, problem), timeout_s)
        if texts := sorted({text for text, _ in ends if text}):
            raise WorkspaceError("; ".join(texts))
        if problems := by_rank(text for _, text in ends):
            raise UnsupportedError(
                f"NVSHMEM cannot join these GPUs ({problems}); each process must see all GPUs of the group "
                "(CUDA_VISIBLE_DEVICES), or use exchange='collective'"
            )
        peers = tuple(bytes_at(address, nbytes, self.device) for address in addresses)
        peers[self.group.rank].zero_()
        torch.cuda.synchronize(self.device)
        self.group.barrier("symmetric memory", timeout_s)
        block = SymmetricBlock(nbytes, peers, addresses, own)
        self._tables[own] = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return block

    def _divide(self, nbytes: int, timeout_s: float) -> int:
        """First place in the arena that is free on every rank of the group."""
        assert WORLD.arena is not None
        base, size = WORLD.arena
        taken = sorted(
            tuple(t) for own in self.group.exchange("arena", list(WORLD.taken.items()), timeout_s) for t in own
        )
        offset = 0
        for start, length in taken:
            if offset + nbytes <= start:
                break
            offset = max(offset, start + length)
        if offset + nbytes > size:
            raise WorkspaceError(
                f"the arena of sub-groups has {size >> 20} MiB and no room for {nbytes / 2**20:.1f} MiB more; "
                "set FA_A2A_ARENA_MIB higher on every rank"
            )
        WORLD.taken[offset] = nbytes
        return base + offset

    def free(self, block: SymmetricBlock, timeout_s: float) -> None:
        """After an error the block stays until the group makes its next workspace: a peer that has not heard of it yet
        may still be storing into it, and the collective free would wait for a rank that does not come."""
        assert isinstance(block.handle, int)
        self._tables.pop(block.handle, None)
        if self.group.poisoned is not None:
            WORLD.left.setdefault(self.group.name, []).append(block)
        else:
            self._give_back(block)

    def _give_back(self, block: SymmetricBlock) -> None:
        own = block.handle
        assert isinstance(own, int)
        if not self.whole_world:
            assert WORLD.arena is not None
            WORLD.taken.pop(own - WORLD.arena[0], None)
        else:
            from nvshmem import bindings

            bindings.free(own)

    def _free_what_was_left(self, timeout_s: float) -> None:
        """Every rank is here, so each has closed its workspace and waited for its GPU: nobody stores any more."""
        blocks = WORLD.left.get(self.group.name, [])
        sizes = self.group.exchange("blocks left", [block.nbytes for block in blocks], timeout_s)
        if all(size == sizes[0] for size in sizes):
            WORLD.left.pop(self.group.name, None)
            for block in blocks:
                self._give_back(block)

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
        flags = _ADVANCE * advance | _PUBLISH * publish | _WAIT * wait
        self._signal(
            self.signal_table(block),
            self.group.rank,
            self.group.size,
            int(word),
            flags,
            fingerprint,
            int(timeout_s * 1e9),
            self.record_address,
        )

    def signal_table(self, block: SymmetricBlock) -> torch.Tensor:
        """Where each rank's part of the block is mapped here, int64 on the device: for kernels that publish."""
        return self._tables[block.handle]  # type: ignore[index]

    def release(
        self, block: SymmetricBlock, timeout_s: float, *, advance: bool = False, silent: bool = False
    ) -> Release:
        """For a kernel that ends a call itself. advance: it also counts the call; silent: something else ends it."""
        flags = 0 if silent else _PUBLISH | _WAIT | _ADVANCE * advance
        rank, size, table = self.group.rank, self.group.size, self.signal_table(block)
        return Release(table, self._counter, rank, size, flags, int(timeout_s * 1e9), self.record_address)

    @property
    def record_address(self) -> int:
        """Where a kernel writes why its wait failed."""
        return self._record.data_ptr()

    def fault(self) -> Fault | None:
        if not self._fields[0]:
            return None
        code, word, rank, peer, expected, found, _, last = self._fields
        if code == _TOLD and (notice := Notice.unpacked(last % (1 << 64))) is not None:
            return replace(Fault.told(notice, Word(word), rank, expected), in_kernel=True)
        kind = "mismatch" if code == _MISMATCH else "deadline"
        return Fault(kind, Word(word), rank, peer, expected, found, in_kernel=True)

    def words(self, block: SymmetricBlock) -> list[int]:
        torch.cuda.current_stream(self.device).synchronize()
        own = block.peers[self.group.rank].view(torch.int64)[:SIGNAL_WORDS]
        return [w % (1 << 64) for w in own.tolist()]
