"""What a rank's process does around its work. Imports no torch: a rank ends with its parent from the start."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ..errors import FaA2AError
from . import interrupt

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def enter(parent: int, pipe: Connection, work: bytes, rank: int) -> None:
    """The process's target. work: a pickled function and its arguments behind the rank; unpickling imports torch.

    Sends None, or the error: as it is, where it is meant for the user, else the text of its traceback.
    """
    _end_with(parent)
    report: object = None
    with interrupt.raising():
        try:
            function, arguments = pickle.loads(work)
            function(rank, *arguments)
        except interrupt.Terminated:
            _leave(128 + signal.SIGTERM)
        except (FaA2AError, BrokenPipeError) as error:
            report = error
        except BaseException:
            report = traceback.format_exc()
    with suppress(OSError, interrupt.Terminated):
        pipe.send(report)
    if report is not None:
        _leave(1)  # what a failed call left open must not delay the end


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _end_with(parent: int) -> None:
    """Ends this process when its parent does, whatever it is doing."""
    if sys.platform == "linux" and not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        if os.getppid() != parent:  # it died before
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _prctl(option: int, value: int) -> int:
    """0, or -1 where the system refuses."""
    try:
        call: Any = ctypes.CDLL(None, use_errno=True).prctl
        return int(call(option, ctypes.c_ulong(value), 0, 0, 0))
    except (OSError, AttributeError):
        return -1


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
