"""compute-sanitizer over the project's kernels, small shapes, one GPU. Skipped where the tool is not installed.

All three tools must find nothing, and on one H200 (CUDA 13.0, 2026-11-30) they do: there is no finding to triage. What
that says, by tool:
  memcheck   accesses of the threads and of bulk copies to global memory, caching of torch switched off
  racecheck  shared memory: hazards between ordinary accesses that no barrier orders; with a bulk copy on one side it
             relies on its own view of mbarriers, so the order of TMA loads and stores rests on the kernels' own tables
  synccheck  barriers: named ones with other counts than their threads, mbarriers used before they are made
Neither sees another GPU, nor orders at system scope: that is what `fa-a2a litmus` and tests/multigpu are for.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa_a2a.ops import kernels

HERE = Path(__file__).parent
KERNELS = (
    *("signal", "scatter st", "scatter bulk", "persistent 128", "persistent 64", "persistent 64 small", "overlapped"),
    *("fa3 128", "fa3 64"),
)
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


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
@pytest.mark.parametrize("tool", CLEAN)
def test_nothing_is_found(device, need, sanitizer, tool, kernel):
    if kernel.startswith("fa3"):
        trouble = kernels.problem("fa3", device, torch.bfloat16, int(kernel[4:]), True)
        need("gpu", trouble is None, str(trouble))
    code, text = run(sanitizer, tool, kernel)
    assert code == 0, text[-4000:]
    assert CLEAN[tool] in text, text[-4000:]
