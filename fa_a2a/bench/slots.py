"""Memory of two GPUs in equal slots at one stride: the first slot on this GPU, the others on the other one.

NVSHMEM maps one peer at one distance. Two GPUs that stand for more (emulate.py) need as many mappings as peers, so they
are made here by the driver's virtual memory calls: each GPU allocates its first slot and what the other one will store
into, hands that over as a file descriptor, and maps both side by side.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import torch

from ..comm.group import Group, by_rank
from ..comm.pointer import bytes_at
from ..errors import UnsupportedError


class Slots:
    """num_slots slots of nbytes or more, at `stride` bytes. views[c]: slot c as uint8; received[c - 1]: what the other
    GPU has as its slot c, here. Collective over a group of two; `close` ends it, and the views with it.

    Raises UnsupportedError on both ranks where the GPUs or the driver cannot do this.
    """

    def __init__(self, group: Group, device: torch.device, num_slots: int, nbytes: int, timeout_s: float = 30.0):
        assert group.size == 2 and num_slots >= 2
        self._end = contextlib.ExitStack()
        self._index = device.index or 0
        torch.cuda.synchronize(device)  # makes the context that the driver's calls need
        problem = None
        try:
            granularity = _granularity(self._index)
            self.stride = -(-nbytes // granularity) * granularity
            own, theirs = self._allocate(self.stride), self._allocate((num_slots - 1) * self.stride)
        except UnsupportedError as error:
            problem = str(error)
        self._agree(group, problem, timeout_s)
        try:
            others = self._swap(theirs, group, timeout_s)
            first = self._map([(own, self.stride), (others, (num_slots - 1) * self.stride)])
            received = self._map([(theirs, (num_slots - 1) * self.stride)])
        except (UnsupportedError, OSError) as error:
            problem = str(error)
        self._agree(group, problem, timeout_s)
        self.views = tuple(bytes_at(first + c * self.stride, self.stride, device) for c in range(num_slots))
        self.received = tuple(bytes_at(received + c * self.stride, self.stride, device) for c in range(num_slots - 1))
        self._group, self._device = group, device

    def close(self, timeout_s: float = 30.0) -> None:
        """When neither GPU stores into the other's memory any more. Collective."""
        torch.cuda.synchronize(self._device)
        self._group.barrier("slots", timeout_s)
        self._end.close()

    def _agree(self, group: Group, problem: str | None, timeout_s: float) -> None:
        if told := by_rank(group.exchange("slots", problem, timeout_s)):
            self._end.close()
            raise UnsupportedError(f"these two GPUs cannot stand for more ({told}); measure with as many GPUs as ranks")

    def _allocate(self, nbytes: int) -> Any:
        from cuda.bindings import driver

        handle = _call(driver.cuMemCreate, nbytes, _properties(self._index), 0)
        self._end.callback(_call, driver.cuMemRelease, handle)
        return handle

    def _swap(self, handle: Any, group: Group, timeout_s: float) -> Any:
        """The other rank's allocation for this one's."""
        from cuda.bindings import driver

        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        fd = int(_call(driver.cuMemExportToShareableHandle, handle, kind, 0))
        try:
            got = _swap_descriptors(fd, group, timeout_s)
        finally:
            os.close(fd)
        try:
            found = _call(driver.cuMemImportFromShareableHandle, got, kind)
        finally:
            os.close(got)
        self._end.callback(_call, driver.cuMemRelease, found)
        return found

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
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


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


def _swap_descriptors(fd: int, group: Group, timeout_s: float) -> int:
    """A descriptor of the other process for one of this. Sockets without a name in the file system."""
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as way:
        for each in (door, way):
            each.settimeout(timeout_s)
        door.bind("")  # the kernel chooses a name
        door.listen(1)
        names = group.exchange("descriptors", door.getsockname().hex(), timeout_s)
        way.connect(bytes.fromhex(names[1 - group.rank]))
        socket.send_fds(way, [b"x"], [fd])
        guest, _ = door.accept()
        with guest:
            guest.settimeout(timeout_s)
            _, found, _, _ = socket.recv_fds(guest, 1, 1)
    return found[0]
