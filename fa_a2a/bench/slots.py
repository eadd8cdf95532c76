"""Memory of two GPUs in equal slots at one stride: the first slot on this GPU, the others on the other one.

NVSHMEM maps one peer at one distance. Two GPUs that stand for more (emulate.py) need as many mappings as peers, so they
are made here by the driver's virtual memory calls: each GPU allocates its first slot and what the other one will store
into, hands that over as a file descriptor, and maps both side by side.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..comm.group import Group, by_rank
from ..comm.pointer import bytes_at
from ..errors import UnsupportedError

Made = TypeVar("Made")


class Slots:
    """num_slots slots of nbytes or more, at `stride` bytes. views[c]: slot c as uint8; received[c - 1]: what the other
    GPU has as its slot c, here. Collective over a group of two; `close` ends it, and the views with it.

    Raises UnsupportedError on both ranks where the GPUs or the driver cannot do this. No error leaves anything behind.
    """

    def __init__(self, group: Group, device: torch.device, num_slots: int, nbytes: int, timeout_s: float = 30.0):
        assert group.size == 2 and num_slots >= 2
        self._group, self._device, self._index = group, device, device.index or 0
        self._end = contextlib.ExitStack()
        torch.cuda.synchronize(device)  # makes the context that the driver's calls need
        try:
            with group.together(), contextlib.ExitStack() as until_swapped:
                first, received = self._make(num_slots, nbytes, timeout_s, until_swapped)
        except BaseException:
            self._end.close()
            raise
        self.views = tuple(bytes_at(first + c * self.stride, self.stride, device) for c in range(num_slots))
        self.received = tuple(bytes_at(received + c * self.stride, self.stride, device) for c in range(num_slots - 1))

    def close(self, timeout_s: float = 30.0) -> None:
        """When neither GPU stores into the other's memory any more. Collective, unless an error has cut the two apart:
        the driver keeps memory as long as either has it mapped."""
        try:
            torch.cuda.synchronize(self._device)
            if self._group.poisoned is None:
                self._group.barrier("slots", timeout_s)
        finally:
            self._end.close()

    def _make(
        self, num_slots: int, nbytes: int, timeout_s: float, until_swapped: contextlib.ExitStack
    ) -> tuple[int, int]:
        """Addresses of the first slot, and of the first of `received`."""
        granularity = self._on_both(lambda: _granularity(self._index), timeout_s)
        self.stride = -(-nbytes // granularity) * granularity
        rest = (num_slots - 1) * self.stride

        def allocate() -> tuple[Any, Any, int, socket.socket]:
            own, theirs = self._allocate(self.stride), self._allocate(rest)
            descriptor = _export(theirs)
            until_swapped.callback(os.close, descriptor)
            return own, theirs, descriptor, until_swapped.enter_context(_door(timeout_s))

        own, theirs, descriptor, door = self._on_both(allocate, timeout_s)
        names = self._group.exchange("descriptors", door.getsockname().hex(), timeout_s)

        def swap_and_map() -> tuple[int, int]:
            others = self._import(_swap(descriptor, door, bytes.fromhex(names[1 - self._group.rank])))
            return self._map([(own, self.stride), (others, rest)]), self._map([(theirs, rest)])

        return self._on_both(swap_and_map, timeout_s)

    def _on_both(self, step: Callable[[], Made], timeout_s: float) -> Made:
        """What the step makes here; UnsupportedError on both ranks where either cannot."""
        made, problem = [], None
        try:
            made.append(step())
        except (UnsupportedError, OSError) as error:
            problem = str(error)
        if told := by_rank(self._group.exchange("slots", problem, timeout_s)):
            raise UnsupportedError(f"these two GPUs cannot stand for more ({told}); measure with as many GPUs as ranks")
        return made[0]

    def _allocate(self, nbytes: int) -> Any:
        from cuda.bindings import driver

        handle = _call(driver.cuMemCreate, nbytes, _properties(self._index), 0)
        self._end.callback(_call, driver.cuMemRelease, handle)
        return handle

    def _import(self, descriptor: int) -> Any:
        """The allocation behind a descriptor, which is closed."""
        from cuda.bindings import driver

        try:
            handle = _call(driver.cuMemImportFromShareableHandle, descriptor, _shared_as())
        finally:
            os.close(descriptor)
        self._end.callback(_call, driver.cuMemRelease, handle)
        return handle

    def _map(self, parts: list[tuple[Any, int]]) -> int:
        """Maps the allocations one behind the other, for this GPU to read and write."""
        from cuda.bindings import driver

        total = sum(nbytes for _, nbytes in parts)
        first = int(_call(driver.cuMemAddressReserve, total, 0, 0, 0))
        self._end.callback(_call, driver.cuMemAddressFree, first, total)
        at = first
        for handle, nbytes in parts:
            _call(driver.cuMemMap, at, nbytes, 0, handle, 0)
            self._end.callback(_call, driver.cuMemUnmap, at, nbytes)
            at += nbytes
        access = driver.CUmemAccessDesc()
        access.location = _properties(self._index).location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(driver.cuMemSetAccess, first, total, [access], 1)
        return first


def _properties(index: int) -> Any:
    from cuda.bindings import driver

    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    properties.requestedHandleTypes = _shared_as()
    return properties


def _shared_as() -> Any:
    from cuda.bindings import driver

    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _granularity(index: int) -> int:
    from cuda.bindings import driver

    wanted = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(_call(driver.cuMemGetAllocationGranularity, _properties(index), wanted))


def _call(function: Any, *arguments: Any) -> Any:
    """One of the driver's calls: its result, or UnsupportedError."""
    from cuda.bindings import driver

    error, *results = function(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(f"{function.__name__}: {error.name}")
    return results[0] if results else None


def _export(handle: Any) -> int:
    from cuda.bindings import driver

    return int(_call(driver.cuMemExportToShareableHandle, handle, _shared_as(), 0))


def _door(timeout_s: float) -> socket.socket:
    """A socket without a name in the file system, where the other process hands its descriptor over. It waits for less
    than the group does, so that both ranks hear of one that does not come."""
    door = socket.socket(socket.AF_UNIX)
    try:
        door.settimeout(timeout_s / 3)
        door.bind("")  # the kernel chooses a name
        door.listen(1)
    except BaseException:
        door.close()
        raise
    return door


def _swap(descriptor: int, door: socket.socket, name: bytes) -> int:
    """A descriptor of the process whose door has this name, for one of this process. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as way:
        way.settimeout(door.gettimeout())
        way.connect(name)
        socket.send_fds(way, [b"x"], [descriptor])
        guest, _ = door.accept()
        with guest:
            guest.settimeout(door.gettimeout())
            _, found, _, _ = socket.recv_fds(guest, 1, 1)
    if not found:
        raise ConnectionError("the other process handed no memory over")
    return found[0]
