"""The host channel of a group: small values by rank, through the store of torch.distributed, with a deadline on every
wait. It carries set-up and errors; no call in steady state touches it.

Keys outlive what posted them: under torchrun the store belongs to the agent, and a process group that is taken down and
made anew has its old name there. So a channel first meets: each rank posts a number of its own and those it has seen of
the others, until everyone's holds everyone's. A rank that shows this channel's number cannot be a leftover, and the
numbers together name the keys from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..errors import FaA2AError, PeerError, PeerMismatchError, PeerTimeoutError

Watch = Callable[[Callable[[int], bool]], None]


class Channel:
    """name, ranks: of the group, global ranks in its order; rank: own index in it."""

    def __init__(self, store: Any, name: str, ranks: tuple[int, ...], rank: int) -> None:
        self.name, self.ranks, self.rank, self.size = name, ranks, rank, len(ranks)
        self._base = dist.distributed_c10d.PrefixStore(f"fa_a2a/{name}/{ranks}", store)
        self._number = secrets.token_hex(8)
        self._met: Any = None
        self.incarnation = 0  # counts reset(); every rank resets, so the numbers agree
        self._count = 0
        self._last_key: str | None = None

    def reset(self) -> None:
        """Forgets what was said. Collective in spirit: the keys move on with every reset."""
        self.incarnation += 1
        self._count = 0

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _store(self, topic: str, timeout_s: float) -> Any:
        """The store under this channel's own keys; the first time it waits until all ranks have met."""
        if self._met is None:
            seen: dict[int, str] = {}
            deadline, pause = time.monotonic() + timeout_s, 1e-4
            self._show(seen)
            while missing := self._look(seen):
                if time.monotonic() > deadline:
                    raise self._missing(missing, topic, timeout_s)
                time.sleep(pause)
                pause = min(2 * pause, 5e-3)
            numbers = [self._number if r == self.rank else seen[r] for r in range(self.size)]
            digest = hashlib.sha256("".join(numbers).encode()).hexdigest()[:16]
            self._met = dist.distributed_c10d.PrefixStore(digest, self._base)
        return self._met

    def _show(self, seen: dict[int, str]) -> None:
        self._base.set(f"here/{self.rank}", json.dumps([self._number, seen]))

    def _look(self, seen: dict[int, str]) -> list[int]:
        """Reads what the others show, shows what is new of it, and returns who has not seen this rank yet."""
        missing, before = [], dict(seen)
        for r in range(self.size):
            if r == self.rank:
                continue
            number, theirs = json.loads(self._base.get(f"here/{r}")) if self._base.check([f"here/{r}"]) else ("", {})
            if number:
                seen[r] = number
            if theirs.get(str(self.rank)) != self._number:
                missing.append(r)
        if seen != before:
            self._show(seen)
        return missing

    # -- exchanging --------------------------------------------------------------------------------------------------

    def exchange(self, topic: str, value: object, timeout_s: float, watch: Watch | None = None) -> list[Any]:
        """Every rank's value for this exchange, by rank. Values are JSON.

        Ranks call it in the same order. `watch` is called while waiting, with a function that
        says whether a rank has come by now, and may raise.
        Raises PeerTimeoutError naming the ranks that did not come within `timeout_s` seconds.
        """
        prefix = f"{self.incarnation}/{self._count}/{topic}"
        self._count += 1
        try:
            store = self._store(topic, timeout_s)
            store.set(f"{prefix}/{self.rank}", json.dumps(value))
            self._await([f"{prefix}/{r}" for r in range(self.size)], topic, timeout_s, watch)
            values = [json.loads(store.get(f"{prefix}/{r}")) for r in range(self.size)]
            self._sweep(f"{prefix}/{self.rank}")
        except Exception as error:
            if isinstance(error, FaA2AError):
                self.abandon(error)
                raise
            raise self._gone(topic, error) from error
        except BaseException as error:  # Ctrl-C: this rank will not read the others' values
            self.abandon(error)
            raise
        return values

    def _await(self, keys: list[str], topic: str, timeout_s: float, watch: Watch | None) -> None:
        missing = [r for r in range(self.size) if r != self.rank]
        deadline, pause = time.monotonic() + timeout_s, 1e-4
        while missing := [r for r in missing if not self._met.check([keys[r]])]:
            self._heed_abandoned()
            if watch is not None:
                watch(lambda r: self._met.check([keys[r]]))
            if time.monotonic() > deadline:
                raise self._missing(missing, topic, timeout_s)
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        self._heed_abandoned()  # all had come, and somebody may have left since

    def _missing(self, missing: list[int], topic: str, timeout_s: float) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"rank {missing[0]} of group {self.name!r} (global rank {self.ranks[missing[0]]}) did not reach "
            f"'{topic}' within {timeout_s:g} s (missing ranks: {missing}); every rank of the group must make "
            "the same calls in the same order"
        )

    def _gone(self, topic: str, error: Exception) -> PeerTimeoutError:
        """The store's host has ended; its connection errors are no news to a user."""
        return PeerTimeoutError(
            f"the store of torch.distributed stopped answering rank {self.rank} during '{topic}': {error}; the process "
            "that holds it, rank 0's or its launcher, has ended: start all ranks anew"
        )

    @property
    def _abandoned(self) -> str:
        return f"{self.incarnation}/abandoned"

    def abandon(self, error: BaseException) -> None:
        """Tells ranks that come later that nobody waits for them any more. Best effort: the store may be gone."""
        with contextlib.suppress(Exception):  # of a rank that met nobody yet, too: nobody waits for it here
            if not self._met.check([self._abandoned]):
                told = [
                    isinstance(error, PeerMismatchError),
                    f"rank {self.rank} gave up: {str(error) or type(error).__name__}",
                ]
                self._met.set(self._abandoned, json.dumps(told))

    def _heed_abandoned(self) -> None:
        """Raises the error of the rank that gave up, of the same kind."""
        if self._met.check([self._abandoned]):
            mismatch, text = json.loads(self._met.get(self._abandoned))
            raise (PeerMismatchError if mismatch else PeerTimeoutError)(text)

    def _sweep(self, key: str) -> None:
        """Deletes this rank's key of the exchange before: whoever posted to this one had read it."""
        if self._last_key is not None:
            self._met.delete_key(self._last_key)
        self._last_key = key

    # -- leaving -----------------------------------------------------------------------------------------------------

    def leave(self, poisoned: str | None, timeout_s: float) -> str | None:
        """Waits until every rank leaves, too; one that an error has cut off (`poisoned`) says so and does not wait.

        Returns the error of a rank that had one. All that wait come to one end: either every rank has left, or the
        first one that gave up says for all that they have not. Raises PeerTimeoutError like `exchange`, unless an
        earlier error was heard of.
        """
        try:
            return self._leave(poisoned, timeout_s)
        except FaA2AError:
            raise
        except Exception as error:
            raise self._gone("close", error) from error

    def _leave(self, poisoned: str | None, timeout_s: float) -> str | None:
        keys = [f"{self.incarnation}/leaving/{r}" for r in range(self.size)]
        store = self._store("close", timeout_s)
        store.set(keys[self.rank], json.dumps(poisoned))
        if poisoned is not None:
            return poisoned
        try:
            self._await(keys, "close", timeout_s, None)
        except PeerError as error:
            if store.check([self._abandoned]):
                return str(error)
            if end := self._end(str(error)):
                raise PeerTimeoutError(end) from error
        if end := self._end(""):
            return f"a rank did not wait: {end}"
        errors = [json.loads(store.get(key)) for key in keys]
        self._sweep(keys[self.rank])
        store.delete_key(f"{self.incarnation - 1}/end")  # all have read it: they were through with that leave
        return next(filter(None, errors), None)

    def _end(self, proposal: str) -> str:
        """The end of this leave: what the first rank proposed, "" for a good one."""
        key = f"{self.incarnation}/end"
        return str(json.loads(self._met.compare_set(key, "", json.dumps(proposal))))
