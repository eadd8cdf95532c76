"""The process's NVSHMEM world: who can be in it, how it starts, and the memory that is allocated in it.

One world for each process, over the ranks of the default process group. It lasts as long as the process.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import torch

from .. import config
from ..errors import ConfigurationError, GroupError, UnsupportedError, WorkspaceError
from .group import Group, by_rank, host_identity, world
from .symmetric import SymmetricBlock

_INITIALIZED = 2  # nvshmemx_init_status: initialised, by us or by another library of this process

# The library is for one host: no remote transport. Multicast is not used, and setting it up can fail on shared hosts.
_ENVIRONMENT = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_NVLS": "1"}


class World:
    """The process's NVSHMEM world: PE numbers of the default group's ranks, and the sub-groups' arena."""

    def __init__(self) -> None:
        self.joined = False
        self.size = 0  # PEs, the same as ranks of the default group
        self.unusable: str | None = None
        self.arena: tuple[int, int] | None = None  # address, bytes
        self.taken: dict[int, int] = {}  # arena offset -> bytes
        # blocks that an error kept from being freed, by group; see Nvshmem.free
        self.left: dict[str, list[SymmetricBlock]] = {}


WORLD = World()


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
    if len(set(uuids)) < len(uuids) and not config.share_gpu():
        return f"two ranks use one GPU ({', '.join(uuids)}); start one process for each GPU and set its device first"
    here = device.index if device.index is not None else torch.cuda.current_device()
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for rank, uuid in enumerate(uuids):
        index = visible.get(uuid)
        if index is not None and index != here and not torch.cuda.can_device_access_peer(here, index):
            return f"GPU {here} cannot access the memory of rank {rank}'s GPU"
    return None


def initialize(device: torch.device, timeout_s: float, with_arena: bool) -> None:
    """Joins this process to the NVSHMEM world, and allocates the arena (FA_A2A_ARENA_MIB) where any rank asks for one.

    Collective over the default process group, like the creation of a group. Raises UnsupportedError, the same on every
    rank, where the ranks cannot share memory; GroupError naming the ranks that did not come in time.
    """
    if WORLD.unusable is not None:
        raise UnsupportedError(WORLD.unusable)
    if WORLD.joined and world().size != WORLD.size:
        raise UnsupportedError(
            f"this process's NVSHMEM world has {WORLD.size} ranks, for good, and the default group was made anew with "
            f"{world().size}; start processes anew, or use exchange='collective'"
        )
    if WORLD.joined and (not with_arena or WORLD.arena is not None):
        return
    everyone = world()
    mine = {**find(device), "arena": 0, "wrong": None}
    try:
        mine["arena"] = int(config.read_number("FA_A2A_ARENA_MIB") * (1 << 20)) if with_arena else 0
    except ConfigurationError as error:  # this rank's own: the others must not wait for it
        mine["wrong"] = str(error)
    try:
        entries = everyone.exchange("nvshmem", mine, timeout_s)
    except TimeoutError as error:
        raise GroupError(
            f"NVSHMEM starts on all ranks of the default group together, and some did not come: {error}; "
            "where a rank takes part in no group, call fa_a2a.initialize() there"
        ) from error
    if wrong := by_rank(entry["wrong"] for entry in entries):
        raise ConfigurationError(wrong)
    problem = joint_problem(entries, device)
    # can_device_access_peer is each rank's own finding: one rank's reason is everyone's
    problems = [p for p in everyone.exchange("nvshmem verdict", problem, timeout_s) if p]
    if problems:
        WORLD.unusable = problems[0]
        raise UnsupportedError(problems[0])
    if not WORLD.joined:
        _start(everyone, device, timeout_s)
    arena = max(entry["arena"] for entry in entries)
    if arena and WORLD.arena is None:
        WORLD.arena = (malloc(arena), arena)


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
        WORLD.unusable = (
            f"NVSHMEM was initialised by another library, with {sizes[0]} processes, and the default group has "
            f"{everyone.size}; initialise it over the same ranks, or leave it to fa_a2a"
        )
        raise UnsupportedError(WORLD.unusable)
    WORLD.joined, WORLD.size = True, everyone.size


def malloc(nbytes: int) -> int:
    from nvshmem import bindings

    address: int = bindings.malloc(nbytes)
    if not address:
        raise WorkspaceError(
            f"NVSHMEM could not allocate {nbytes} bytes of symmetric memory; free GPU memory and start anew"
        )
    torch.cuda.synchronize()
    return address
