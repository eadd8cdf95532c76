"""Symmetric memory between GPUs of one host: NVSHMEM through nvshmem4py's host API.

One NVSHMEM world for each process, over the ranks of the default process group; groups map into it. A group that is the
whole world allocates from NVSHMEM directly. NVSHMEM's allocation is collective over its world, so sub-groups, which
must be able to grow alone, share an arena that is allocated once and divided by agreement inside the group.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import torch

from .. import config
from ..errors import GroupError, UnsupportedError, WorkspaceError
from ..layout import SIGNAL_WORDS, Notice, Word, aligned
from .group import Group, host_identity, world
from .pointer import bytes_at
from .symmetric import Fault, Release, SymmetricBlock, SymmetricMemory

_ADVANCE, _PUBLISH, _WAIT = 1, 2, 4  # flags of the signal kernel
_RECORD_WORDS = 8
_INITIALIZED = 2  # nvshmemx_init_status: initialised, by us or by another library of this process
_MISMATCH, _TOLD = 2, 3  # codes of a record

# The library is for one host: no remote transport. Multicast is not used, and setting it up can fail on shared hosts.
_ENVIRONMENT = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_NVLS": "1"}


class _World:
    """The process's NVSHMEM world: PE numbers of the default group's ranks, and the sub-groups' arena."""

    def __init__(self) -> None:
        self.joined = False
        self.size = 0  # PEs, the same as ranks of the default group
        self.unusable: str | None = None
        self.arena: tuple[int, int] | None = None  # address, bytes
        self.taken: dict[int, int] = {}  # arena offset -> bytes
        # blocks that an error kept from being freed, by group; see Nvshmem.free
        self.left: dict[tuple[int, ...], list[SymmetricBlock]] = {}


_world = _World()


def find(device: torch.device) -> dict[str, Any]:
    """What this rank brings to a common NVSHMEM world; JSON. `problem` is a reason against it, or None."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    problem = None
    for module in ("nvshmem", "tvm_ffi", "cutlass", "flash_attn.cute"):
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            problem = f"the package that provides '{module}' is not installed; pip install 'fa_a2a[cu13]'"
            break
    return {
        "host": host_identity(),
        "index": index,
        "uuid": str(torch.cuda.get_device_properties(index).uuid),
        "capability": list(torch.cuda.get_device_capability(index)),
        "problem": problem,
    }


def joint_problem(found: list[dict[str, Any]], device: torch.device) -> str | None:
    """The reason why these ranks cannot share symmetric memory, the same on every rank but for peer access, or None."""
    for rank, entry in enumerate(found):
        if entry["problem"]:
            return f"rank {rank}: {entry['problem']}"
        if entry["host"] != found[0]["host"]:
            return (
                f"rank {rank} is on host {entry['host'][0]}, rank 0 on {found[0]['host'][0]}; the path is for one host"
            )
        if entry["capability"] != found[0]["capability"]:
            return f"rank {rank} has compute capability {entry['capability']}, rank 0 {found[0]['capability']}"
    uuids = [entry["uuid"] for entry in found]
    if len(set(uuids)) < len(uuids):
        return f"two ranks use one GPU ({', '.join(uuids)}); start one process for each GPU and set its device first"
    here = device.index if device.index is not None else torch.cuda.current_device()
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for rank, uuid in enumerate(uuids):
        index = visible.get(uuid)
        if index is not None and index != here and not torch.cuda.can_device_access_peer(here, index):
            return f"GPU {here} cannot access the memory of rank {rank}'s GPU"
    return None


def initialize(device: torch.device, timeout_s: float, arena_bytes: int = 0) -> None:
    """Joins this process to the NVSHMEM world, and allocates the arena where any rank asks for one.

    Collective over the default process group, like the creation of a group. Raises UnsupportedError, the same on every
    rank, where the ranks cannot share memory; GroupError naming the ranks that did not come in time.
    """
    if _world.unusable is not None:
        raise UnsupportedError(_world.unusable)
    if _world.joined and (not arena_bytes or _world.arena is not None):
        return
    everyone = world()
    try:
        entries = everyone.exchange("nvshmem", {**find(device), "arena": arena_bytes}, timeout_s)
    except TimeoutError as error:
        raise GroupError(
            f"NVSHMEM starts on all ranks of the default group together, and some did not come: {error}; "
            "where a rank takes part in no group, call fa_a2a.initialize() there"
        ) from error
    problem = joint_problem(entries, device)
    # can_device_access_peer is each rank's own finding: one rank's reason is everyone's
    problems = [p for p in everyone.exchange("nvshmem verdict", problem, timeout_s) if p]
    if problems:
        _world.unusable = problems[0]
        raise UnsupportedError(problems[0])
    if not _world.joined:
        _start(everyone, device, timeout_s)
    arena = max(entry["arena"] for entry in entries)
    if arena and _world.arena is None:
        _world.arena = (_malloc(arena), arena)


def _start(everyone: Group, device: torch.device, timeout_s: float) -> None:
    for name, value in _ENVIRONMENT.items():
        config.set_default(name, value)
    torch.cuda.init()  # type: ignore[no-untyped-call]  # NVSHMEM binds to the context that exists
    torch.zeros(1, device=device)
    import nvshmem.core as nvshmem
    from cuda.core import Device
    from cuda.pathfinder import load_nvidia_dynamic_lib
    from nvshmem import bindings

    load_nvidia_dynamic_lib("nvshmem_host")
    already = int(bindings.init_status()) >= _INITIALIZED
    states = everyone.exchange("nvshmem state", bool(already), timeout_s)
    if any(states) and not all(states):
        raise GroupError(
            f"NVSHMEM is initialised on some ranks and not on others: {states}; initialise it on all or none"
        )
    if not already:
        uid = nvshmem.get_unique_id(empty=everyone.rank != 0)
        size = uid._data.nbytes
        mine = ctypes.string_at(uid.ptr, size).hex() if everyone.rank == 0 else None
        ctypes.memmove(uid.ptr, bytes.fromhex(everyone.exchange("nvshmem id", mine, timeout_s)[0]), size)
        Device(device.index).set_current()
        nvshmem.init(
            device=Device(device.index), uid=uid, rank=everyone.rank, nranks=everyone.size, initializer_method="uid"
        )
    sizes = everyone.exchange("nvshmem size", int(bindings.n_pes()), timeout_s)
    if any(size != everyone.size for size in sizes):  # allocation is collective over its world: it would not return
        _world.unusable = (
            f"NVSHMEM was initialised by another library, with {sizes[0]} processes, and the default group has "
            f"{everyone.size}; initialise it over the same ranks, or leave it to fa_a2a"
        )
        raise UnsupportedError(_world.unusable)
    _world.joined, _world.size = True, everyone.size


def _malloc(nbytes: int) -> int:
    from nvshmem import bindings

    address: int = bindings.malloc(nbytes)
    if not address:
        raise WorkspaceError(
            f"NVSHMEM could not allocate {nbytes} bytes of symmetric memory; free GPU memory and start anew"
        )
    torch.cuda.synchronize()
    return address


class Nvshmem(SymmetricMemory):
    """Symmetric memory of a group whose ranks each hold one GPU of this host."""

    name = "nvshmem"

    def __init__(self, group: Group, device: torch.device, timeout_s: float) -> None:
        from fa4_a2a.signal import load_signal

        self.group, self.device = group, device
        self.whole_world = group.size == world().size
        arena = 0 if self.whole_world else int(config.read_number("FA_A2A_ARENA_MIB") * (1 << 20))
        initialize(device, timeout_s, arena)
        from nvshmem import bindings

        # asked anew for each group: PE numbers last as long as the process, ranks as long as the default group
        self.positions = tuple(group.exchange("nvshmem pe", int(bindings.my_pe()), timeout_s))
        self.world = _world.size
        self._free_what_was_left(timeout_s)
        with torch.inference_mode(False):
            self._record = torch.zeros(_RECORD_WORDS, dtype=torch.int64, pin_memory=True)
            self._counter = torch.zeros(1, dtype=torch.int64, device=device)  # of blocks that have ended
        # read on every call: by ctypes, since a look through torch costs microseconds
        self._fields = (ctypes.c_int64 * _RECORD_WORDS).from_address(self._record.data_ptr())
        self._tables: dict[int, torch.Tensor] = {}
        major, minor = torch.cuda.get_device_capability(device)
        self._signal = load_signal(f"sm_{major}{minor}a")

    def allocate(self, nbytes: int, timeout_s: float) -> SymmetricBlock:
        from nvshmem import bindings

        nbytes = aligned(nbytes)
        own = _malloc(nbytes) if self.whole_world else self._divide(nbytes, timeout_s)
        addresses = tuple(
            own if r == self.group.rank else bindings.ptr(own, self.positions[r]) for r in range(self.group.size)
        )
        if not all(addresses):
            raise UnsupportedError(f"NVSHMEM has no mapping of rank {addresses.index(0)}'s memory on this GPU")
        peers = tuple(bytes_at(address, nbytes, self.device) for address in addresses)
        peers[self.group.rank].zero_()
        torch.cuda.synchronize(self.device)
        self.group.barrier("symmetric memory", timeout_s)
        block = SymmetricBlock(nbytes, peers, addresses, own)
        self._tables[own] = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return block

    def _divide(self, nbytes: int, timeout_s: float) -> int:
        """First place in the arena that is free on every rank of the group."""
        assert _world.arena is not None
        base, size = _world.arena
        taken = sorted(
            tuple(t) for own in self.group.exchange("arena", list(_world.taken.items()), timeout_s) for t in own
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
        _world.taken[offset] = nbytes
        return base + offset

    def free(self, block: SymmetricBlock, timeout_s: float) -> None:
        """After an error the block stays until the group makes its next workspace: a peer that has not heard of it yet
        may still be storing into it, and the collective free would wait for a rank that does not come."""
        assert isinstance(block.handle, int)
        self._tables.pop(block.handle, None)
        if self.group.poisoned is not None:
            _world.left.setdefault(self.group.ranks, []).append(block)
        else:
            self._give_back(block)

    def _give_back(self, block: SymmetricBlock) -> None:
        own = block.handle
        assert isinstance(own, int)
        if not self.whole_world:
            assert _world.arena is not None
            _world.taken.pop(own - _world.arena[0], None)
        else:
            from nvshmem import bindings

            bindings.free(own)

    def _free_what_was_left(self, timeout_s: float) -> None:
        """Every rank is here, so each has closed its workspace and waited for its GPU: nobody stores any more."""
        blocks = _world.left.pop(self.group.ranks, [])
        sizes = self.group.exchange("blocks left", [block.nbytes for block in blocks], timeout_s)
        if all(size == sizes[0] for size in sizes):
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
        return Release(table, rank, size, self.record_address, self._counter, flags, int(timeout_s * 1e9))

    @property
    def record_address(self) -> int:
        """Where a kernel writes why its wait failed."""
        return self._record.data_ptr()

    def fault(self) -> Fault | None:
        if not self._fields[0]:
            return None
        code, word, rank, peer, expected, found, _, last = self._fields
        if code == _TOLD and (notice := Notice.unpacked(last % (1 << 64))) is not None:
            return Fault.told(notice, Word(word), rank, expected)
        return Fault("mismatch" if code == _MISMATCH else "deadline", Word(word), rank, peer, expected, found)

    def words(self, block: SymmetricBlock) -> list[int]:
        torch.cuda.current_stream(self.device).synchronize()
        own = block.peers[self.group.rank].view(torch.int64)[:SIGNAL_WORDS]
        return [w % (1 << 64) for w in own.tolist()]
