"""A process group as this library sees it: its ranks, and a host channel that cannot hang.

The channel goes through the store of torch.distributed, so that it works for any backend and any subset of ranks, and
every wait has a deadline. It carries set-up and errors; no call in steady state touches it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import FaA2AError, GroupError, PeerError, PeerMismatchError, PeerTimeoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..ops.plan import Plan
    from .workspace import Workspace

Watch = Callable[[Callable[[int], bool]], None]
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
        self.incarnation = 0  # counts reset(); every rank resets, so the numbers agree
        self.poisoned: str | None = None
        self.plans: dict[int, Plan] = {}  # by fingerprint: the configurations every rank has agreed on
        self.settled: dict[object, Plan] = {}  # the same, by what a caller passed
        self.workspace: Workspace | None = None
        self._store = dist.distributed_c10d.PrefixStore(f"fa_a2a/{self.name}/{self.ranks}", _default_store())
        self._count = 0
        self._last_key: str | None = None

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
        self.incarnation += 1
        self._count = 0
        self.poisoned = None
        self.plans.clear()
        self.settled.clear()

    def exchange(self, topic: str, value: object, timeout_s: float, watch: Watch | None = None) -> list[Any]:
        """Every rank's value for this exchange, by rank. Values are JSON.

        Ranks call it in the same order. `watch` is called while waiting, with a function that
        says whether a rank has come by now, and may raise. A failure poisons the group.
        Raises PeerTimeoutError naming the ranks that did not come within `timeout_s` seconds.
        """
        prefix = f"{self.incarnation}/{self._count}/{topic}"
        self._count += 1
        try:
            self._store.set(f"{prefix}/{self.rank}", json.dumps(value))
            self._await([f"{prefix}/{r}" for r in range(self.size)], topic, timeout_s, watch)
            values = [json.loads(self._store.get(f"{prefix}/{r}")) for r in range(self.size)]
        except FaA2AError as error:
            self._abandon(error)
            raise
        except Exception as error:  # the store's host is gone: its connection errors are no news to a user
            self.poisoned = f"the store of torch.distributed stopped answering during '{topic}': {error}"
            raise PeerTimeoutError(self.poisoned) from error
        self._sweep(f"{prefix}/{self.rank}")
        return values

    def _await(self, keys: list[str], topic: str, timeout_s: float, watch: Watch | None) -> None:
        missing = [r for r in range(self.size) if r != self.rank]
        deadline, pause = time.monotonic() + timeout_s, 1e-4
        while missing := [r for r in missing if not self._store.check([keys[r]])]:
            self._heed_abandoned()
            if watch is not None:
                watch(lambda r: self._store.check([keys[r]]))
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"rank {missing[0]} of group {self.name!r} (global rank {self.ranks[missing[0]]}) did not reach "
                    f"'{topic}' within {timeout_s:g} s (missing ranks: {missing}); every rank of the group must make "
                    "the same calls in the same order"
                )
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        self._heed_abandoned()  # all had come, and somebody may have left since

    @property
    def _abandoned(self) -> str:
        return f"{self.incarnation}/abandoned"

    def _abandon(self, error: FaA2AError) -> None:
        """Tells ranks that come later that nobody waits for them any more. Best effort: the store may be gone."""
        self.poisoned = self.poisoned or str(error)
        with contextlib.suppress(Exception):
            if not self._store.check([self._abandoned]):
                told = [isinstance(error, PeerMismatchError), f"rank {self.rank} gave up: {error}"]
                self._store.set(self._abandoned, json.dumps(told))

    def _heed_abandoned(self) -> None:
        """Raises the error of the rank that gave up, of the same kind."""
        if self._store.check([self._abandoned]):
            mismatch, text = json.loads(self._store.get(self._abandoned))
            raise (PeerMismatchError if mismatch else PeerTimeoutError)(text)

    def _sweep(self, key: str) -> None:
        """Deletes this rank's key of the exchange before: whoever posted to this one had read it."""
        if self._last_key is not None:
            self._store.delete_key(self._last_key)
        self._last_key = key

    def leave(self, timeout_s: float) -> None:
        """Waits until every rank leaves, too; a rank that an error has cut off says so and does not wait.

        Afterwards `poisoned` is set on every rank if it was on one. Raises PeerTimeoutError like `exchange`.
        """
        keys = [f"{self.incarnation}/leaving/{r}" for r in range(self.size)]
        try:
            self._store.set(keys[self.rank], json.dumps(self.poisoned))
            if self.poisoned is not None:
                return
            self._await(keys, "close", timeout_s, None)
            self.poisoned = next(filter(None, (json.loads(self._store.get(key)) for key in keys)), None)
            self._sweep(keys[self.rank])
        except Exception as error:
            healthy, self.poisoned = self.poisoned is None, self.poisoned or str(error)
            if healthy and not (isinstance(error, PeerError) and self._store.check([self._abandoned])):
                raise

    def barrier(self, topic: str, timeout_s: float) -> None:
        self.exchange(topic, None, timeout_s)


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


_groups: dict[str, Group] = {}


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
            f"got {group!r}"
        )
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


def host_identity() -> list[str]:
    """Name and boot of this host: processes that agree in both can share memory, unless containers part them."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return [platform.node(), boot]
