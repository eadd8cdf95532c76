"""Programs of two ranks each, in processes of their own, all at once on two GPUs."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def _start(rank, port, arguments, environ):
    paths = [str(ROOT), str(ROOT / "cute"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_"))}
    environment = {**outside, **{k: str(v) for k, v in ours.items()}, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, str(HERE / "stage_program.py"), *arguments],
        env={**environment, **(environ(rank) if environ else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def run(programs, timeout_s):
    """programs: name -> (arguments, environ(rank) or None). Returns name -> [(JSON or None, errors' text)] by rank.

    Kills what is left: a stopped rank does not end by itself.
    """
    started = {
        name: [_start(rank, port, arguments, environ) for rank in range(2)]
        for (name, (arguments, environ)), port in zip(programs.items(), _free_ports(len(programs)))
    }
    until, found = time.monotonic() + timeout_s, {}
    for name, processes in started.items():
        found[name] = []
        for process in processes:
            try:
                out, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            lines = [line for line in out.splitlines() if line.startswith("{")]
            found[name].append((json.loads(lines[-1]) if lines else None, err[-2000:]))
    return found
