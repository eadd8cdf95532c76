import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fa4_a2a import cache
from fa4_a2a.cache import CacheError, cached_kernels, load_or_compile

ROOT = Path(__file__).parents[2] / "cute"


class Exported:
    """Stands for a compiled kernel: exports a copy of an object made once."""

    def __init__(self, obj):
        self.obj, self.builds = obj, 0

    def build(self):
        self.builds += 1
        return self

    def export_to_c(self, object_file_path, function_name):
        assert function_name == cache.ENTRY
        shutil.copy(self.obj, object_file_path)


@pytest.fixture(scope="session")
def signal_object(tmp_path_factory):
    from fa4_a2a.signal_kernel import compile_signal

    path = tmp_path_factory.mktemp("object") / "signal.o"
    compile_signal("sm_90a").export_to_c(object_file_path=str(path), function_name=cache.ENTRY)
    return path


@pytest.fixture
def kernel(signal_object, tmp_path, monkeypatch):
    monkeypatch.setenv("FA_A2A_CACHE_DIR", str(tmp_path / "cache"))
    return Exported(signal_object)


def forget():
    """As a new process would find things."""
    cache._loaded.clear()


def only_file() -> Path:
    (found,) = cached_kernels()
    return found.path


def test_second_load_does_not_compile(kernel):
    first = load_or_compile("k", {"tile": 1}, kernel.build)
    assert load_or_compile("k", {"tile": 1}, kernel.build) is first
    forget()
    with pytest.raises(TypeError, match="8 parameters"):
        load_or_compile("k", {"tile": 1}, kernel.build)()
    assert kernel.builds == 1
    assert only_file().suffix == ".so"


def test_key_parts_make_different_kernels(kernel, monkeypatch):
    load_or_compile("k", {"tile": 1}, kernel.build)
    load_or_compile("k", {"tile": 2}, kernel.build)
    assert kernel.builds == 2
    monkeypatch.setattr(cache, "_version", lambda package: "0")
    load_or_compile("k", {"tile": 1}, kernel.build)
    assert kernel.builds == 3
    monkeypatch.setattr(cache, "source_hash", lambda: "edited")
    load_or_compile("k", {"tile": 1}, kernel.build)
    assert kernel.builds == 4
    assert sorted(k.current for k in cached_kernels()) == [False, False, False, True]
    assert {k.key["tile"] for k in cached_kernels()} == {1, 2}


def truncate(path):
    path.write_bytes(path.read_bytes()[:5000])


def alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, alter, empty])
def test_damaged_file_is_rebuilt(kernel, damage, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_load", lambda path: object)  # not mapped here: damaging a mapped file kills the process
        load_or_compile("k", {}, kernel.build)
    damage(only_file())
    assert not cached_kernels()[0].intact
    forget()
    with pytest.raises(TypeError, match="8 parameters"):
        load_or_compile("k", {}, kernel.build)()
    assert kernel.builds == 2
    assert cached_kernels()[0].intact


def test_without_a_linker_the_object_itself_is_kept(kernel, monkeypatch):
    monkeypatch.setattr(cache, "_link", lambda obj: None)
    load_or_compile("k", {}, kernel.build)
    assert only_file().suffix == ".o"
    forget()
    with pytest.raises(TypeError, match="8 parameters"):
        load_or_compile("k", {}, kernel.build)()
    assert kernel.builds == 1


def test_unusable_folder_says_what_to_do(kernel, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FA_A2A_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match="FA_A2A_CACHE_DIR"):
        load_or_compile("k", {}, kernel.build)


def python(code: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_processes_at_once_compile_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_A2A_CACHE_DIR", str(tmp_path / "cache"))
    code = """
from fa4_a2a import cache, signal
store = cache._store
def counted(*args):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    return store(*args)
cache._store = counted
signal.load_signal("sm_90a")
"""
    log = tmp_path / "log"
    for process in [python(code, str(log)) for _ in range(3)]:
        output(process)
    assert log.read_text() == "built\n"


def test_loading_does_not_import_cutlass(kernel):
    from fa4_a2a.signal import load_signal

    load_signal("sm_90a")
    code = """
import json
from fa4_a2a.signal import load_signal
load_signal("sm_90a")
print(json.dumps([m for m in ("cutlass", "flash_attn", "quack", "triton") if m in sys.modules]))
"""
    assert json.loads(output(python(code))) == []


def test_importing_is_cheap():
    code = """
import json
import fa4_a2a, fa4_a2a.cache, fa4_a2a.forward, fa4_a2a.signal, fa4_a2a.litmus, fa4_a2a.build, fa4_a2a.runtime
print(json.dumps([m for m in ("torch", "tvm_ffi", "cutlass", "flash_attn", "fa_a2a") if m in sys.modules]))
"""
    assert json.loads(output(python(code))) == []


def test_build_all_reports_each_kernel(cache_folder):
    from fa4_a2a.build import build_all

    seen = []
    built = build_all("sm_90a", head_dims=(64,), dtypes=("bfloat16",), with_lse=(False,), report=seen.append)
    assert [b.name for b in built] == [
        "signal sm_90a",
        "clock sm_90a",
        "scatter sm_90a D=64 bfloat16",
        "scatter sm_90a D=64 bfloat16 unequal",
        "forward sm_90a D=64 bfloat16 tile 192x128",
        "persistent sm_90a D=64 bfloat16 tile 192x128",
        "forward sm_90a D=64 bfloat16 tile 128x128",
        "persistent sm_90a D=64 bfloat16 tile 128x128",
    ]
    assert built == seen
    with pytest.raises(ValueError, match="sm_100a"):
        build_all("sm_80")
