"""Ctrl-C and SIGTERM, for the command and for what starts ranks. Imports no torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, as KeyboardInterrupt is none."""


def _raise(number: int, frame: Any) -> None:
    raise Terminated


@contextmanager
def _handling(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Only the main thread may set handlers; what the caller ignores (nohup) stays ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def raising() -> Iterator[None]:
    """SIGTERM raises Terminated, as SIGINT raises KeyboardInterrupt."""
    with _handling({signal.SIGTERM: _raise}):
        yield


@contextmanager
def noted() -> Iterator[list[int]]:
    """SIGINT and SIGTERM only append their number to the list: for code that must not be left halfway."""
    seen: list[int] = []
    note = lambda number, frame: seen.append(number)
    with _handling({signal.SIGINT: note, signal.SIGTERM: note}):
        yield seen


def leave(seen: list[int]) -> None:
    """Raises what the first of these signals stands for."""
    if seen:
        raise KeyboardInterrupt if seen[0] == signal.SIGINT else Terminated


@contextmanager
def held_back() -> Iterator[None]:
    """Blocks SIGINT; processes started meanwhile have it blocked for ever, so that Ctrl-C reaches their parent only."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
