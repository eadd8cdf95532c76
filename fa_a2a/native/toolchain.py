"""Where nvcc, CUTLASS and tvm-ffi are on this machine."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from .. import config
from ..errors import UnsupportedError


@dataclass(frozen=True)
class Toolchain:
    nvcc: Path
    cutlass: Path  # folder of headers
    tvm_ffi: Path  # the package's folder


def sources() -> Path:
    """The folder of the C++ sources: in a wheel inside the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    folders = (package / "csrc/fa3_a2a", package.parent / "csrc/fa3_a2a")
    return next((f for f in folders if (f / "forward.cu").is_file()), folders[0])


def find_nvcc() -> Path | None:
    """A toolkit's by CUDA_HOME or CUDA_PATH, on the PATH, in /usr/local, or that of the package nvidia-cuda-nvcc."""
    folders = [Path(home) / "bin" for home in map(config.foreign, ("CUDA_HOME", "CUDA_PATH")) if home]
    if found := shutil.which("nvcc"):
        folders.append(Path(found).parent)
    folders += sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        folders += sorted(Path(root).glob("c*/bin"), reverse=True)  # nvidia/cu13, nvidia/cuda_nvcc
    return next((f / "nvcc" for f in folders if (f / "nvcc").is_file()), None)


def find_cutlass() -> Path | None:
    """The headers in CUTLASS_HOME, or those in the package nvidia-cutlass."""
    folders = []
    if home := config.foreign("CUTLASS_HOME"):
        folders.append(Path(home) / "include")
    spec = importlib.util.find_spec("cutlass_library")
    if spec is not None and spec.origin:
        folders.append(Path(spec.origin).parent / "source/include")
    return next((f for f in folders if (f / "cute/tensor.hpp").is_file()), None)


def missing() -> str | None:
    """What is not here that compiling needs, with the way to it; None if it can."""
    if importlib.util.find_spec("tvm_ffi") is None:
        return "the package that provides 'tvm_ffi'; pip install 'fa_a2a[fa3]'"
    if find_nvcc() is None:
        return "nvcc; install the CUDA toolkit 12.4 or newer and set CUDA_HOME, or pip install 'fa_a2a[fa3]'"
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return "a C++ compiler for nvcc; install g++"
    if find_cutlass() is None:
        return "the headers of CUTLASS; pip install 'fa_a2a[fa3]', or set CUTLASS_HOME to a checkout of CUTLASS 4"
    return None


def find() -> Toolchain:
    """Raises UnsupportedError that names what is missing."""
    if (what := missing()) is not None:
        raise UnsupportedError(f"compiling kernel 'fa3' needs {what}")
    nvcc, cutlass, spec = find_nvcc(), find_cutlass(), importlib.util.find_spec("tvm_ffi")
    assert nvcc is not None and cutlass is not None and spec is not None and spec.origin is not None
    return Toolchain(nvcc, cutlass, Path(spec.origin).parent)
