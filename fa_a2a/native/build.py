"""One shared object for each variant of the C++ kernel, in the user's cache; compiled at first use or ahead of time.

The file's name carries a hash of the sources and of what the object is called through, not of the compiler: what was
compiled elsewhere can be used where there is no compiler. A file appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from .. import config
from ..errors import ConfigurationError, UnsupportedError
from ..xstage.tiles import FA3_TILES
from .toolchain import Toolchain, find, missing, sources

ARCH = "sm_90a"
TILES = {head_dim: tuple((t.rows, t.keys) for t in tiles) for head_dim, tiles in FA3_TILES.items()}
OUTPUTS = ("staged", "direct")
SLICE_ROWS = 16  # of a staged tile; config.cuh's kSliceRows

_loaded: dict[Path, Callable[..., None]] = {}
_loading = threading.Lock()


class Variant(NamedTuple):
    """What is fixed when an object is compiled.

    tile: (query rows, 64 for each consumer warpgroup; keys), the table's first by default. output: staged, paced out by
    a warp of its own; or direct, 16-byte stores from registers, which leave room for 176 keys at head_dim 128. All but
    another number of keys compute the same bits.
    """

    head_dim: int
    dtype: str
    tile: tuple[int, int] | None = None
    output: str = "staged"

    @property
    def shape(self) -> tuple[int, int]:
        return self.tile or TILES[self.head_dim][0]

    @property
    def name(self) -> str:
        rows, keys = self.shape
        return f"fa3-{ARCH}-d{self.head_dim}-{self.dtype}-{rows}x{keys}-{self.output}"

    def defines(self) -> list[str]:
        rows, keys = self.shape
        values = {
            "HEAD_DIM": self.head_dim,
            "HALF": int(self.dtype == "float16"),
            "GROUPS": rows // 64,
            "KEYS": keys,
            "STAGED": int(self.output == "staged"),
        }
        return [f"-DFA3_{name}={value}" for name, value in values.items()]


def variants(head_dim: int, dtype: str) -> tuple[Variant, ...]:
    """All that kernel 'fa3' may take for this head_dim and type."""
    return tuple(Variant(head_dim, dtype, tile) for tile in TILES[head_dim])


def load(variant: Variant) -> Callable[..., None]:
    """The entry point `forward` of csrc/fa3_a2a/forward.cu. Among processes that ask at once, one compiles.

    Raises UnsupportedError where the object is not in the cache and cannot be compiled."""
    with _loading:
        path = build(variant)
        if path not in _loaded:
            _loaded[path] = _load(path)
        return _loaded[path]


def build(variant: Variant) -> Path:
    """The variant's object in the cache, compiled if it is not there; for machines without a GPU, too."""
    path = cached(variant)
    if not path.is_file():
        _make_directory(path.parent)
        with _locked(path.with_suffix(".lock")):
            if not path.is_file():
                compile_to(variant, path)
    return path


def problem(variant: Variant) -> str | None:
    """Why load() would raise, or None. Runs no compiler."""
    if cached(variant).is_file():
        return None
    what = missing()
    return None if what is None else f"kernel 'fa3' is not in the cache, and compiling it needs {what}"


def cached(variant: Variant) -> Path:
    """Where the variant's object is, or will be."""
    return config.cache_dir() / "fa3" / f"{variant.name}-{_key()}.so"


def compile_to(variant: Variant, path: Path, found: Toolchain | None = None) -> str:
    """Compiles the variant into the file; returns what the compiler said, ptxas's resource report included."""
    tools = found or find()
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as scratch:
        made = Path(scratch) / "kernel.so"
        done = subprocess.run(command(variant, made, tools), capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode:
            lines = [line for line in said.splitlines() if "error" in line or "fatal" in line] or said.splitlines()
            raise UnsupportedError(f"{tools.nvcc} cannot compile kernel 'fa3': {' | '.join(lines[:3])}")
        os.replace(made, path)
    return said


def command(variant: Variant, out: Path, tools: Toolchain) -> list[str]:
    includes = (tools.cutlass, tools.tvm_ffi / "include", tools.tvm_ffi / "3rdparty/dlpack/include")
    return [
        str(tools.nvcc),
        *("-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden"),
        "-gencode=arch=compute_90a,code=sm_90a",
        *("--expt-relaxed-constexpr", "--use_fast_math", "-DNDEBUG", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"),
        "-Xptxas=-v,-warn-spills",
        *variant.defines(),
        *(f"-I{folder}" for folder in includes),
        str(sources() / "forward.cu"),
        f"-L{tools.nvcc.parent.parent / 'lib'}",  # where the packaged toolkit has the runtime, and nvcc does not look
        *("-o", str(out), f"-L{tools.tvm_ffi / 'lib'}", "-ltvm_ffi"),
    ]


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Of the C++ sources without their comment lines: the log of figures at the head of one changes no kernel."""
    digest = hashlib.sha256()
    for path in sorted(p for p in sources().glob("*") if p.suffix in (".cu", ".cuh", ".h")):
        lines = (line for line in path.read_text().splitlines() if not line.lstrip().startswith("//"))
        digest.update("\n".join((path.name, *lines)).encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def _key() -> str:
    digest = hashlib.sha256(source_hash().encode())
    with suppress(PackageNotFoundError):
        digest.update(version("apache-tvm-ffi").encode())
    return digest.hexdigest()[:16]


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # its files are executed: nobody else may write here
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the kernel cache {directory} ({error}); set FA_A2A_CACHE_DIR to a writable folder"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive among processes. Where the file system has no locks, at worst it is compiled twice."""
    with open(path, "w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(path: Path) -> Any:
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path))["forward"]
    except (OSError, RuntimeError) as error:
        way_out = "delete it to have it compiled anew; the cache's folder must not be mounted noexec"
        raise UnsupportedError(f"{path} cannot be loaded ({error}); {way_out}") from error
