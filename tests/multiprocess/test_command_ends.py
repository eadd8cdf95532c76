"""However the command ends, its ranks end with it: signals at start-up and mid-run, a killed parent, a rank's error."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fa_a2a.bench import launch
from fa_a2a.errors import FaA2AError, PeerError, ShapeError

ROOT = Path(__file__).parents[2]
RANKS = 2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def children(pid):
    """Of a process and of its threads: the ranks and multiprocessing's tracker."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return found


def alive(pids):
    def running(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if running(pid)]


def wait_until(condition, seconds):
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)
    return value


@pytest.fixture
def sweep(tmp_path):
    """A sweep that takes minutes, as a terminal starts it: a process group of its own, signals not ignored."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cute")]),
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "fa_a2a", "sweep", "--device", "cpu", "--ranks", str(RANKS), "--rounds", "500"]
    before = set(Path("/dev/shm").glob("fa_a2a-*"))
    process = subprocess.Popen(
        [*command, "--seq-lens", "128,512"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        process.ranks = wait_until(lambda: len(found := children(process.pid)) > RANKS and found, 60)
        yield process
        assert not set(Path("/dev/shm").glob("fa_a2a-*")) - before
    finally:
        for pid in alive([process.pid, *getattr(process, "ranks", [])]):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def check_end(process, code, began):
    """One line, the right code, nothing left, soon."""
    out, err = process.communicate(timeout=20)
    took = time.monotonic() - began
    said = [line for line in err.splitlines() if line.strip() and "round/s]" not in line]  # beside the progress bar
    assert (process.returncode, said) == (code, ["fa-a2a: interrupted"]), err
    assert "Traceback" not in out
    wait_until(lambda: not alive(process.ranks), 1)
    assert took < 3, f"{took:.1f} s"  # 2 s on a machine that does nothing else


@pytest.mark.parametrize("delay_s", [0.0, 1.5])
def test_sigterm_while_the_ranks_start(sweep, delay_s):
    time.sleep(delay_s)
    began = time.monotonic()
    sweep.send_signal(signal.SIGTERM)
    check_end(sweep, 143, began)


@pytest.mark.parametrize("delay_s", [1.0])
def test_ctrl_c_while_the_ranks_start(sweep, delay_s):
    time.sleep(delay_s)
    began = time.monotonic()
    os.killpg(sweep.pid, signal.SIGINT)
    check_end(sweep, 130, began)


def test_sigint_to_the_parent_alone_in_the_middle(sweep):
    while "2 ranks on CPU" not in sweep.stdout.readline():
        pass
    time.sleep(0.5)
    began = time.monotonic()
    sweep.send_signal(signal.SIGINT)
    check_end(sweep, 130, began)


def test_ranks_end_when_their_parent_is_killed(sweep):
    sweep.kill()
    wait_until(lambda: not alive(sweep.ranks), 3)


def misshapen(device):
    """The ranks' own errors differ: rank 1 is at fault, and rank 0 only misses it."""
    if torch.distributed.get_rank() == 1:
        raise ShapeError("rank 1 is at fault; correct it")
    raise PeerError("rank 1 is missing")


def broken(device):
    if torch.distributed.get_rank() == 1:
        raise KeyError("a bug")
    time.sleep(60)


def killed(device):
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (misshapen, ShapeError, "^rank 1 is at fault; correct it$"),
        (broken, FaA2AError, "^rank 1 failed:\nTraceback(.|\n)*a bug"),
        (killed, PeerError, "^rank 1 ended with signal SIGKILL"),
    ],
)
def test_a_failing_rank_ends_the_run_with_its_error(body, kind, message):
    with pytest.raises(kind, match=message):
        launch.run(body, 2, "cpu")
