"""compute-sanitizer over the project's kernels, small shapes, one GPU. Skipped where the tool is not installed.

memcheck must be clean. racecheck sees shared memory only, and only hazards between ordinary accesses that barriers it
knows would order; it does not follow an mbarrier that bulk copies complete. So it says nothing of the loads and stores
by TMA, and what it may report for a kernel with such a pipeline is a write by a consumer and the bulk copy behind an
mbarrier, or a reuse of a stage: each ordered by the barrier that the kernel's own table names. The kernels that touch
shared memory without such a pipeline (signal, scatter by threads) must be clean.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = ("signal", "scatter st", "scatter bulk", "persistent 128", "persistent 64")


@pytest.fixture
def sanitizer():
    places = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    places += sorted(Path("/usr/local").glob("cuda*/bin"))
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *map(str, places)]))
    if tool is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    return tool


def run(sanitizer, tool, kernel):
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-name-exclude", "kernel_substring=at::"]
    done = subprocess.run(
        [*command, sys.executable, str(HERE / "sanitizer_program.py"), kernel],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # or an access past one tensor hits its neighbour
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kernel", KERNELS)
def test_memcheck(device, sanitizer, kernel):
    code, text = run(sanitizer, "memcheck", kernel)
    assert code == 0, text[-4000:]
    assert "ERROR SUMMARY: 0 errors" in text, text[-4000:]


@pytest.mark.parametrize("kernel", ["signal", "scatter st"])
def test_racecheck(device, sanitizer, kernel):
    code, text = run(sanitizer, "racecheck", kernel)
    assert code == 0, text[-4000:]
