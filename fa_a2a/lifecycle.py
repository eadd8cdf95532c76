"""Start and end of the symmetric memory: what a program may do explicitly, and rarely has to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .comm.group import all_groups, resolve
from .errors import ConfigurationError
from .ops.deadlines import own_options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def initialize(device: torch.device | None = None, timeout_s: float | None = None) -> None:
    """Joins this GPU to the symmetric memory of the default group. Collective over the default process group.

    Only needed on ranks that belong to no group that calls attention, while others do: NVSHMEM starts on all ranks
    together. device: the current CUDA device by default. Raises UnsupportedError where the GPUs cannot share memory,
    GroupError where a rank does not come within timeout_s seconds (FA_A2A_TIMEOUT_S or 30 by default).
    Without a GPU, or for a CPU device, there is nothing to start: it returns at once.
    """
    if device is not None and not isinstance(device, torch.device):
        raise ConfigurationError(f"device must be a torch.device or None, got {device!r}")
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    if device is not None and on_gpu:
        resolve(None)  # GroupError before anything about the device
    if device is not None and not _is_here(device):
        raise ConfigurationError(
            f"device must be a CPU or one of this process's {torch.cuda.device_count()} CUDA devices, got {device}"
        )
    seconds, refused = own_options(timeout_s)
    if on_gpu:
        from .comm.nvshmem_world import initialize as start

        where = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        start(where, seconds, with_arena=True)
    if refused is not None:
        raise refused


def _is_here(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())


def close(group: ProcessGroup | DeviceMesh | str | None = None, timeout_s: float | None = None) -> None:
    """Frees the group's workspace and forgets its errors. Collective over the group.

    Outputs that are views of the workspace end here. The next call makes a new workspace. Raises PeerTimeoutError where
    a rank does not close within timeout_s seconds, unless an earlier error had cut the ranks apart.
    """
    where = resolve(group)
    where.check_process()
    seconds, refused = own_options(timeout_s)
    try:
        if where.workspace is not None:
            where.workspace.close(seconds)
    finally:
        where.workspace = None
        where.reset()
    if refused is not None:
        raise refused


def memory_bytes() -> dict[str, int]:
    """Symmetric bytes of this rank by group name. On GPUs torch's memory statistics do not see them."""
    return {g.name: g.workspace.allocated_bytes for g in all_groups() if g.workspace is not None}
