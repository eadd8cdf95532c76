"""A process group as this library sees it: its ranks, what they have agreed on, and their host channel."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import FaA2AError, GroupError
from .channel import Channel, Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..ops.plan import Plan
    from .workspace import Workspace

_WAY_IN = "call torch.distributed.init_process_group() first"


class Group:
    """Ranks, host channel and agreement of one process group. One object for each group; see `resolve`."""

    def __init__(self, handle: ProcessGroup) -> None:
        self.handle = handle
        self.name: str = handle.group_name
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(handle))
        self.rank = dist.get_group_rank(handle, dist.get_rank())
        self.size = len(self.ranks)
        self.pid = os.getpid()
        self.poisoned: str | None = None
        self.plans: dict[int, Plan] = {}  # by fingerprint: the configurations every rank has agreed on
        self.settled: dict[object, Plan] = {}  # the same, by what a caller passed
        self.workspace: Workspace | None = None
        self._channel = Channel(_default_store(), self.name, self.ranks, self.rank)

    @property
    def incarnation(self) -> int:
        """Counts reset(); every rank resets, so the numbers agree."""
        return self._channel.incarnation

    def check_process(self) -> None:
        """Raises GroupError in a forked child: the store and the ranks' memory are its parent's."""
        if os.getpid() != self.pid:
            raise GroupError("the group was made in another process; start workers by spawn and join the group there")

    def check_usable(self) -> None:
        """Raises GroupError in a forked child, WorkspaceError after an error that left the ranks apart."""
        self.check_process()
        if self.poisoned is not None:
            from ..errors import WorkspaceError

            raise WorkspaceError(
                f"the workspace was poisoned by an earlier error ({self.poisoned}); "
                "call fa_a2a.close(group) on every rank, then go on"
            )

    def reset(self) -> None:
        """Forgets errors and agreements. Collective in spirit: the channel's keys move on with every reset."""
        self._channel.reset()
        self.poisoned = None
        self.plans.clear()
        self.settled.clear()

    def exchange(self, topic: str, value: object, timeout_s: float, watch: Watch | None = None) -> list[Any]:
        """Channel.exchange; a failure poisons the group. Peers that wait at the channel hear of it there, those that
        begin a call meanwhile from the workspace."""
        try:
            return self._channel.exchange(topic, value, timeout_s, watch)
        except BaseException as error:
            if self.workspace is not None and not self.workspace.closed:
                self.workspace.poison(error)
            self.poisoned = self.poisoned or str(error) or type(error).__name__
            raise

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around steps that every rank makes. An error of this library is one that all ranks have; what else ends the
        steps here, Ctrl-C say, is this rank's alone: it is told, so that nobody waits for what comes no more."""
        try:
            yield
        except FaA2AError:
            raise
        except BaseException as error:
            self.poisoned = self.poisoned or str(error) or type(error).__name__
            self._channel.abandon(error)
            raise

    def leave(self, timeout_s: float) -> None:
        """Waits until every rank leaves, too; a rank that an error has cut off says so and does not wait.

        Afterwards `poisoned` is set on every rank if it was on one. Raises PeerTimeoutError like `exchange`.
        """
        try:
            self.poisoned = self._channel.leave(self.poisoned, timeout_s)
        except Exception as error:
            healthy, self.poisoned = self.poisoned is None, self.poisoned or str(error)
            if healthy:
                raise

    def barrier(self, topic: str, timeout_s: float) -> None:
        self.exchange(topic, None, timeout_s)


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


_NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None  # what new_group gives the others
_groups: dict[str, Group] = {}
_making = threading.Lock()


def resolve(group: ProcessGroup | DeviceMesh | str | None) -> Group:
    """The Group of a process group, a one-dimensional DeviceMesh, a group's name, or None for the default group.

    Raises GroupError where torch.distributed is not initialised or this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise GroupError(f"sequence-parallel attention needs a process group, and there is none; {_WAY_IN}")
    if group is None:
        handle = dist.distributed_c10d._get_default_group()
    elif isinstance(group, str):
        handle = _named(group)
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise GroupError(
                f"a DeviceMesh must have one dimension, got {group.ndim} ({group.mesh_dim_names}); "
                "pass the axis of sequence parallelism, mesh['name']"
            )
        handle = group.get_group()
    elif isinstance(group, dist.ProcessGroup):
        handle = group
    else:
        raise GroupError(
            "group must be a ProcessGroup of which this rank is a member, a one-dimensional DeviceMesh or None, "
            + ("got NonGroupMember: this rank is in none" if group is _NON_MEMBER else f"got {group!r}")
        )
    known = _groups.get(handle.group_name)
    if known is None or known.handle is not handle:
        with _making:
            known = _groups.get(handle.group_name)
            if known is None or known.handle is not handle:
                known = _groups[handle.group_name] = Group(handle)
    return known


def _named(name: str) -> ProcessGroup:
    if (known := _groups.get(name)) is not None:
        return known.handle
    try:
        return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise GroupError(f"there is no process group named {name!r} on this rank; pass the group itself") from error


def all_groups() -> list[Group]:
    """The groups that were used so far."""
    return list(_groups.values())


def world() -> Group:
    """The default group: the ranks that share one NVSHMEM world."""
    return resolve(None)


def by_rank(told: Iterable[str | None]) -> str:
    """What ranks told, in their order, of which most have nothing to say; "" where none has."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)


def host_identity() -> list[str]:
    """Name and boot of this host: processes that agree in both can share memory, unless containers part them."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return [platform.node(), boot]
