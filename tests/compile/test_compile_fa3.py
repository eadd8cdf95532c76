"""The C++ kernel: one object compiled by nvcc, its resource report and its instructions. No GPU needed."""

import subprocess
import sys

import cubin
import pytest
import torch

from fa_a2a import cli
from fa_a2a.errors import UnsupportedError
from fa_a2a.native import build, toolchain

VARIANT = build.Variant(128, "bfloat16")


@pytest.fixture(scope="module")
def made(need, tmp_path_factory):
    """(what the compiler said, the object's instructions, its path)"""
    what = toolchain.missing()
    need("compile", what is None, f"compiling fa3 needs {what}")
    need("compile", cubin.disassembler() is not None, "no nvdisasm (CUDA toolkit, or the triton package)")
    path = tmp_path_factory.mktemp("fa3") / "kernel.so"
    said = build.compile_to(VARIANT, path)
    return said, cubin.instructions(path), path


def test_compiler_has_no_complaint(made):
    said, _, _ = made
    assert "warning" not in said, said  # spills, wgmma serialised, setmaxnreg ignored: ptxas warns of each
    assert "C75" not in said, said
    assert "bytes spill stores" in said
    assert " 0 bytes spill stores, 0 bytes spill loads" in said


def test_instructions(made):
    _, lines, _ = made
    assert cubin.uses(lines, "HGMMA") >= 3 * (128 // 16)  # S of a tile's first block, in the loop, of the next tile
    assert cubin.uses(lines, "UTMALDG") >= 3 * 2  # Q, K and V, two column blocks each
    assert cubin.uses(lines, "UTMASTG") >= 2
    assert cubin.uses(lines, "USETMAXREG") == 2
    assert cubin.uses(lines, "MUFU.EX2") >= 2 * 72  # one for each score of a thread
    assert cubin.no_local_memory(lines)


def test_report_fits_the_registers_of_its_warp(made):
    """The store warp has given most of its own back when it comes to wait for the peers."""
    _, lines, path = made
    assert cubin.beyond_what_is_left(path) == []
    assert cubin.uses(lines, "CALL") == 0  # a function that is called may use any


@pytest.mark.parametrize("tile", build.TILES[64])
def test_tiles_of_64_columns(need, tmp_path, tile):
    what = toolchain.missing()
    need("compile", what is None, f"compiling fa3 needs {what}")
    need("compile", cubin.disassembler() is not None, "no nvdisasm (CUDA toolkit, or the triton package)")
    path = tmp_path / "kernel.so"
    said = build.compile_to(build.Variant(64, "bfloat16", tile), path)
    assert "warning" not in said and "C75" not in said, said
    lines = cubin.instructions(path)
    assert cubin.uses(lines, "HGMMA") >= 3 * (64 // 16) and cubin.uses(lines, "UTMASTG") >= 1
    assert cubin.no_local_memory(lines)
    assert cubin.beyond_what_is_left(path) == []


def test_products_wait_once_each(made):
    """S and P V run at the same time: in the loop one wait leaves the later product running, one waits for it."""
    _, lines, _ = made
    waits = [line for line in lines if "WARPGROUP.DEPBAR" in line]
    assert sum("gsb0, 0x1" in line for line in waits) == 2
    assert sum("gsb0, 0x0" in line for line in waits) == 3


def test_object_loads_without_a_gpu_and_refuses_host_tensors(made):
    forward = build._load(made[2])
    q, k = torch.zeros(1, 1, 8, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    words = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="on a GPU"):
        forward(q, k, k, k, words, None, 0.1, 0, 1, 132, words, words, 0, 1, 0, 0, 0)


def test_error_where_nothing_compiles(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FA_A2A_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: None)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Path("/nowhere/nvcc"))
    with pytest.raises(UnsupportedError, match=r"headers of CUTLASS; pip install 'fa_a2a\[fa3\]'"):
        build.load(VARIANT)
    assert cli.main(["compile", "--arch", "sm_90a", "--kernel", "fa3"]) == 1
    assert "is not in the cache, and compiling it needs the headers of CUTLASS" in capsys.readouterr().err
    assert build.problem(VARIANT) is not None
    build.cached(VARIANT).parent.mkdir(exist_ok=True)
    build.cached(VARIANT).touch()
    assert build.problem(VARIANT) is None  # what is in the cache needs no compiler
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        build.load(VARIANT)


def test_error_of_the_compiler_is_told(need, monkeypatch, tmp_path):
    need("compile", toolchain.missing() is None, f"compiling fa3 needs {toolchain.missing()}")
    monkeypatch.setenv("FA_A2A_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build.Variant, "defines", lambda self: ["-DFA3_HEAD_DIM="])
    with pytest.raises(UnsupportedError, match=r"nvcc cannot compile kernel 'fa3': .*error"):
        build.load(VARIANT)


def test_import_costs_neither_torch_nor_tvm_ffi():
    program = "import sys; import fa_a2a.native.build; assert not {'torch', 'tvm_ffi'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
