"""Programs of two ranks each that may lose each other, in processes of their own, side by side on two GPUs.

A process takes 5 to 10 s to start (imports, CUDA, NCCL, NVSHMEM), which is most of a program's time; AT_ONCE programs
are two processes each. Whatever is left when a program has to be over is ended here, and says where it was.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fa_a2a import config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SLOWER = 4 if config.share_gpu() else 1  # processes that share a GPU also take turns while they start
AT_ONCE = 5 if SLOWER == 1 else 3
GRACE_S = 3.0  # for rank 1 once rank 0 has ended: a stopped process does not end by itself
TAIL = 3000  # characters of a rank's errors


def from_rank_0(make):
    """make() on rank 0 of this session, known to all, the others wait; its error is raised on every rank."""
    box, error = [None, None], None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except BaseException as caught:  # a limit of pytest's is no Exception; the others must not wait on
            box[1], error = f"{type(caught).__name__}: {caught}", caught
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))  # waits without a kernel on the GPU
    if error is not None:
        raise error
    assert box[1] is None, f"on rank 0: {box[1]}"
    return box[0]


class _Rank:
    """One process. Its output goes to files in `folder`: nobody reads pipes while it runs."""

    def __init__(self, folder, rank, port, arguments, environ):
        paths = [str(ROOT), str(ROOT / "cute"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        theirs = ("TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_")
        outside = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
        environment = {**outside, **{k: str(v) for k, v in ours.items()}, "PYTHONPATH": os.pathsep.join(paths)}
        environment["PYTHONFAULTHANDLER"] = "1"  # SIGABRT then prints where each thread is
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there: rank 0 makes none
        self.files = [Path(folder) / f"{port}_{rank}_{kind}" for kind in ("out", "err")]
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            environment |= environ(rank) if environ else {}
            self.process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=out, stderr=err)
        self.note = ""

    @property
    def running(self):
        return self.process.poll() is None

    def end(self, why):
        if self.running:
            self.note = f"\n[ended by the test: {why}]"
            self.process.send_signal(signal.SIGABRT)
            try:
                self.process.wait(0.5)
            except subprocess.TimeoutExpired:  # stopped, or deep in the driver
                self.process.kill()
                self.process.wait()

    def result(self):
        self.process.wait()
        out, err = (file.read_text(errors="replace") for file in self.files)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        errors = f"{err[-TAIL:]}\n[exit status {self.process.returncode}]{self.note}"
        return (json.loads(lines[-1]) if lines else None), errors


class _Program:
    def __init__(self, folder, arguments, environ):
        # held here, on a port that the system chose: another program cannot take it before rank 0 does
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = [_Rank(folder, rank, self.store.port, arguments, environ) for rank in range(2)]
        self.rank_0_ended = None

    @property
    def over(self):
        """Whether both ranks have ended. Rank 0 is the one that outlives faults: with it the program ends."""
        first, second = self.ranks
        if not first.running:
            self.rank_0_ended = self.rank_0_ended or time.monotonic()
            if time.monotonic() - self.rank_0_ended > GRACE_S:
                second.end(f"rank 0 ended {GRACE_S:g} s before")
        return not (first.running or second.running)


def run(programs, limit_s):
    """programs: name -> (arguments of Python, environ(rank) or None). Returns name -> [(JSON, errors)] by rank: the
    last line of JSON that it printed or None, and the end of its standard error with how it ended. All of them together
    take limit_s and five seconds more at most."""
    waiting, running, done, limit_s = list(programs.items()), {}, {}, limit_s * SLOWER
    until = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (waiting or running) and time.monotonic() < until:
                while waiting and len(running) < AT_ONCE:
                    name, what = waiting.pop(0)
                    running[name] = _Program(folder, *what)
                for name in [name for name, program in running.items() if program.over]:
                    done[name] = running.pop(name)
                time.sleep(0.05)
        finally:
            for rank in [rank for program in running.values() for rank in program.ranks]:
                rank.end(f"the limit of {limit_s:g} s for {len(programs)} programs")
        done |= running
        missing = [(None, f"not started within {limit_s:g} s")] * 2
        return {name: [r.result() for r in done[name].ranks] if name in done else missing for name in programs}


def lines(found):
    """What both ranks reported, for the message of an assertion."""
    return "\n".join(f"-- rank {rank}: {report}\n{errors}" for rank, (report, errors) in enumerate(found))
