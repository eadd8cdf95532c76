"""What a compiled kernel needs of the machine it runs on: the DSL's runtime library, through which it launches, and a
CPU for its host half. Nothing here imports cutlass."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from functools import lru_cache
from pathlib import Path

LIBRARY = "libcute_dsl_runtime.so"


@lru_cache(maxsize=1)
def runtime_library() -> Path:
    """The file cutlass itself would choose: CUTE_DSL_LIBS, else the newest CUDA flavour that the driver supports."""
    for candidate in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep):
        if candidate.endswith(LIBRARY):
            return Path(candidate)
    spec = importlib.util.find_spec("cutlass")  # finds, does not import
    if spec is None or spec.origin is None:
        raise ImportError("nvidia-cutlass-dsl is not installed; its runtime library launches the kernels")
    root = Path(spec.origin).parents[2]
    newest = _driver_major() or 99  # without a driver cutlass takes the newest
    flavours = {int(p.parts[-3][2:]): p for p in root.glob(f"cu[0-9]*/lib/{LIBRARY}")}
    usable = [major for major in flavours if major <= newest]
    if not usable:
        raise ImportError(f"no {LIBRARY} under {root} for this driver (CUDA {newest}); there are {sorted(flavours)}")
    return flavours[max(usable)]


@lru_cache(maxsize=1)
def load_runtime() -> ctypes.CDLL:
    """Kernels name this library by soname only; once it is mapped the dynamic linker gives them this copy."""
    return ctypes.CDLL(str(runtime_library()))


def _driver_major() -> int | None:
    try:
        found = ctypes.c_int()
        return found.value // 1000 if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found)) == 0 else None
    except (OSError, AttributeError):
        return None


_LEVELS = (  # the x86-64 psABI levels, by the flags that set each apart
    ("v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("v3", {"avx", "avx2", "bmi1", "bmi2", "fma", "f16c", "movbe"}),
)


@lru_cache(maxsize=1)
def cpu_level() -> str:
    """The DSL compiles the host half of a kernel for the CPU it finds (AVX-512 moves, say, in the argument copies): on
    a lesser CPU that is an illegal instruction. Kernels are therefore kept apart by level, coarse enough that those
    built on one server suit another of its class."""
    machine = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return machine
    flags = set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
    if machine == "x86_64":
        machine += "-" + next((name for name, needed in _LEVELS if needed <= flags), "v2")
    return machine + "".join(f"-{extra}" for extra in ("apx_f", "apx", "sve") if extra in flags)
