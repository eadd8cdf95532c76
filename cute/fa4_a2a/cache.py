"""Compiled kernels on disk, shared by the processes of one user.

A kernel is one file, `name-<hash of its key>.so`: the object that CuTe DSL exports, linked, followed by a trailer

    shared object | JSON of the key | 8 bytes: length of that JSON | SHA-256 of all before | magic

so that a truncated file is seen before dlopen maps it (dlopen of half a file dies of SIGBUS, not of an exception).
Loading needs apache-tvm-ffi and the DSL's runtime library; cutlass itself is not imported. A fresh compile is also
written and loaded back: there is one calling convention. Where no linker exists the object stays a `.o`, which only
cutlass's own loader can read (imports cutlass, about a second).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from .runtime import cpu_level, load_runtime, runtime_library

ENTRY = "func"  # the exported function's name in every file
PACKAGES = ("nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels", "apache-tvm-ffi")
_MAGIC = b"FA4A2A\x00\x01"
_TRAILER = 8 + hashlib.sha256().digest_size + len(_MAGIC)

_loaded: dict[Path, Callable[..., Any]] = {}  # one load per process and file
_loading = threading.Lock()


class CacheError(RuntimeError):
    """The cache directory cannot be used, or a compiled kernel could not be stored in it."""


class CachedKernel(NamedTuple):
    name: str
    path: Path
    size_bytes: int
    intact: bool
    current: bool  # made with the packages and sources of this process; others are left over and may be deleted
    key: dict[str, Any]  # empty where the file is not intact


def cache_dir() -> Path:
    chosen = os.environ.get("FA_A2A_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "fa_a2a"


@lru_cache(maxsize=1)
def source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.name}:{len(text)}:".encode() + text)
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment_key() -> dict[str, Any]:
    """What every kernel depends on besides its own parameters."""
    flavour = runtime_library().parts[-3]  # cu12 and cu13 come with different assemblers
    versions = {package: _version(package) for package in PACKAGES}
    return {"versions": versions, "runtime": flavour, "cpu": cpu_level(), "sources": source_hash()}


def load_or_compile(name: str, key: dict[str, Any], build: Callable[[], Any]) -> Callable[..., Any]:
    """The kernel `name` with parameters `key`; `build` returns what cute.compile returned, and runs only on a miss.

    Among processes that ask at once, one compiles and the others wait for its file.
    """
    key = {**key, **environment_key()}
    text = json.dumps(key, sort_keys=True)
    stem = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    directory = cache_dir()
    with _loading:
        known = _loaded.get(directory / stem)
        if known is not None:
            return known
        function = _load_first(directory, stem)
        if function is None:
            _make_directory(directory)
            with _locked(directory / f"{stem}.lock"):
                function = _load_first(directory, stem)  # another process may have compiled it while this one waited
                if function is None:
                    function = _load_fresh(_store(build(), directory, stem, text))
        _loaded[directory / stem] = function
        return function


def cached_kernels() -> list[CachedKernel]:
    here, found = environment_key().items(), []
    for path in sorted(p for p in cache_dir().glob("*-*") if p.suffix in (".so", ".o")):
        key = _read_key(path)
        current = key is not None and all(key.get(name) == value for name, value in here)
        name = path.stem.rsplit("-", 1)[0]
        found.append(CachedKernel(name, path, path.stat().st_size, key is not None, current, key or {}))
    return found


# -- files ------------------------------------------------------------------------------------------------------------


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # its files are executed: nobody else may write here
    except OSError as error:
        hint = "set FA_A2A_CACHE_DIR to a writable folder"
        raise CacheError(f"cannot make the kernel cache {directory} ({error}); {hint}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive among processes. A process that dies loses its lock. Where the file system has no locks (some NFS) we
    go on without: the file still appears whole, at worst it is compiled twice."""
    with open(path, "w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_key(path: Path) -> dict[str, Any] | None:
    """The key in an intact file's trailer; None where the file is absent, truncated or altered."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body, digest = data[: -_TRAILER + 8], data[-_TRAILER + 8 : -len(_MAGIC)]
    if not data.endswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        return None
    length = int.from_bytes(body[-8:], "little")
    return json.loads(body[-8 - length : -8])


def _store(compiled: Any, directory: Path, stem: str, key_text: str) -> Path:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=directory) as scratch:
        obj = Path(scratch) / "kernel.o"
        compiled.export_to_c(object_file_path=str(obj), function_name=ENTRY)
        built = _link(obj) or obj
        text = key_text.encode()
        body = built.read_bytes() + text + len(text).to_bytes(8, "little")
        whole = Path(scratch) / "whole"
        whole.write_bytes(body + hashlib.sha256(body).digest() + _MAGIC)
        path = directory / f"{stem}{built.suffix}"
        os.replace(whole, path)  # readers see the old file or the new one, never a part
    return path


def _link(obj: Path) -> Path | None:
    """Makes the object a shared one. No path to the runtime is recorded in it: runtime.load_runtime() maps that first,
    and the dynamic linker then finds it by its soname, so a cache may be carried to another machine."""
    from cutlass.cute.runtime import find_runtime_libraries

    out = obj.with_suffix(".so")
    libraries = [lib for lib in find_runtime_libraries(enable_tvm_ffi=True) if Path(lib).exists()]
    common = ["-shared", "-Bsymbolic", "-z", "noexecstack", "-o", str(out), str(obj), *libraries]
    through_driver = ["-shared", "-nostdlib", "-Wl,-Bsymbolic,-z,noexecstack", *common[4:]]
    linkers = [("ld", common), ("ld.lld", common)] + [(cc, through_driver) for cc in ("cc", "gcc", "clang")]
    for tool, arguments in linkers:
        if shutil.which(tool) and subprocess.run([tool, *arguments], capture_output=True).returncode == 0:
            return out
    return None


# -- loading ----------------------------------------------------------------------------------------------------------


def _load_first(directory: Path, stem: str) -> Callable[..., Any] | None:
    for suffix in (".so", ".o"):
        path = directory / f"{stem}{suffix}"
        if _read_key(path) is not None:
            try:
                return _load(path)
            except Exception:  # each loader raises its own; a kernel this machine cannot load is as good as absent
                continue
    return None


def _load_fresh(path: Path) -> Callable[..., Any]:
    try:
        return _load(path)
    except Exception as error:
        raise CacheError(f"{path} was just compiled and cannot be loaded (is its folder mounted noexec?)") from error


def _load(path: Path) -> Callable[..., Any]:
    if path.suffix == ".o":
        from cutlass.cute.runtime import load_module

        return getattr(load_module(str(path), enable_tvm_ffi=True), ENTRY)
    import tvm_ffi

    load_runtime()
    return tvm_ffi.load_module(str(path))[ENTRY]  # needs an absolute path; the module stays loaded
