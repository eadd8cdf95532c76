"""fa-a2a kernel and the builder of the C++ kernel, as far as they go without a GPU and a compiler."""

import argparse
import itertools
import json
import statistics
from pathlib import Path

import pytest

from fa_a2a import cli
from fa_a2a.bench import kernel_designs, kernel_options
from fa_a2a.errors import ConfigurationError, ShapeError, UnsupportedError
from fa_a2a.native import build, toolchain
from fa_a2a.native.build import Variant

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_shapes():
    assert kernel_options.shapes("8192x6,4608x12") == [(8192, 6), (4608, 12)]
    for text in ("", "8192", "8192x", "0x6", "8192x6x128"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected SEQxHEADS"):
            kernel_options.shapes(text)


def test_variants():
    assert kernel_options.variant("128x176/direct", build.OUTPUTS) == ((128, 176), "direct")
    for text in ("128x176", "128x176/paced", "100x176/direct", "128x170/staged", "128/staged", "128x272/staged"):
        with pytest.raises(ConfigurationError, match="a variant is ROWSxKEYS/OUTPUT"):
            kernel_options.variant(text, build.OUTPUTS)


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_kernel_needs_a_gpu(capsys):
    assert cli.main(["kernel"]) == 1
    assert "torch sees none" in capsys.readouterr().err


def test_name_and_defines_of_a_variant():
    assert Variant(128, "bfloat16").name == "fa3-sm_90a-d128-bfloat16-128x144-staged"
    assert Variant(64, "float16", output="direct").defines() == [
        *("-DFA3_HEAD_DIM=64", "-DFA3_HALF=1", "-DFA3_GROUPS=3", "-DFA3_KEYS=128", "-DFA3_STAGED=0")
    ]


def test_objects_lie_in_the_cache_by_variant(monkeypatch, tmp_path):
    monkeypatch.setenv("FA_A2A_CACHE_DIR", str(tmp_path))
    paths = {build.cached(Variant(d, t, output=o)) for d in (64, 128) for t in ("bfloat16", "float16") for o in "ab"}
    assert len(paths) == 8
    assert {p.parent for p in paths} == {tmp_path / "fa3"}


def test_sources_are_found_and_comments_do_not_count(monkeypatch, tmp_path):
    folder = toolchain.sources()
    assert (folder / "forward.cu").is_file()
    (tmp_path / "forward.cu").write_text("// a log\n" + (folder / "forward.cu").read_text())
    for path in folder.glob("*.*h"):
        (tmp_path / path.name).write_text(path.read_text())
    want = build.source_hash()
    monkeypatch.setattr(build, "sources", lambda: tmp_path)
    build.source_hash.cache_clear()
    assert build.source_hash() == want
    (tmp_path / "forward.cu").write_text("int x;\n")
    build.source_hash.cache_clear()
    assert build.source_hash() != want
    build.source_hash.cache_clear()


@pytest.mark.parametrize(
    ("gone", "told"),
    [("find_nvcc", "nvcc; install the CUDA toolkit"), ("find_cutlass", "the headers of CUTLASS; pip install")],
)
def test_what_is_missing_is_named(monkeypatch, tmp_path, gone, told):
    pytest.importorskip("tvm_ffi")
    monkeypatch.setenv("FA_A2A_CACHE_DIR", str(tmp_path))
    for name in ("find_nvcc", "find_cutlass"):
        monkeypatch.setattr(toolchain, name, lambda: tmp_path)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert toolchain.missing() is None
    monkeypatch.setattr(toolchain, gone, lambda: None)
    assert told in str(build.problem(Variant(128, "bfloat16")))
    with pytest.raises(UnsupportedError, match="compiling kernel 'fa3' needs"):
        build.load(Variant(128, "bfloat16"))


def test_toolkit_and_headers_by_their_variables(monkeypatch, tmp_path):
    for path in ("bin/nvcc", "include/cute/tensor.hpp"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUTLASS_HOME", str(tmp_path))
    assert toolchain.find_nvcc() == tmp_path / "bin/nvcc"
    assert toolchain.find_cutlass() == tmp_path / "include"


def test_forms_and_their_chunks():
    known = kernel_designs.FORMS
    assert kernel_options.forms(["all"], known) == list(known)
    assert kernel_options.forms(["persistent", "persistent"], known) == ["stock", "persistent"]
    with pytest.raises(ConfigurationError, match="no_store_warp, or all; got 'fast'"):
        kernel_options.forms(["fast"], known)
    rows = [kernel_designs.Case(4608, 3, ranks, 128, "bfloat16", 2) for ranks in (2, 4)]
    kernel_options.equal_chunks(rows)
    with pytest.raises(ShapeError, match="equal chunks, got 4608 tokens over 5 ranks"):
        kernel_options.equal_chunks([*rows, kernel_designs.Case(4608, 3, 5, 128, "bfloat16", 2)])


def test_forms_are_compared_with_the_better_stock_tile_round_by_round():
    times = {
        "stock": [100.0, 110.0, 120.0],
        "stock 128x176": [99.0, 109.0, 119.0],
        "persistent": [99.99, 110.09, 120.19],
    }
    stock, form = kernel_designs._lines({"kind": "designs"}, times, [1.0, 2.0])
    assert (stock["form"], stock["tile"], stock["us"]) == ("stock", "128x176", 109.0)
    assert "over_stock_percent" not in stock and "calls_us" not in stock
    assert (form["form"], form["over_stock_percent"], form["calls_us"]) == ("persistent", 1.0, [1.0, 2.0])
    assert form["over_stock_ci"] < 0.01
    (alone,) = kernel_designs._lines({}, {"stock": [1.0]}, [])
    assert alone["tile"] == "default"
    assert "109.0 us  tile 128x176" in kernel_designs._row(stock | {"seq_len": 8, "local_heads": 1, "num_ranks": 2})
    assert "+1.00 ± 0.00 % of stock" in kernel_designs._row(form | {"seq_len": 8, "local_heads": 1, "num_ranks": 2})


def test_recorded_forms_with_local_stores_are_no_slower_than_stock():
    """Asked of the epilogue: at most 0.5 % above the stock kernel's better tile from 4608 to 65536 tokens, here for 3,
    6 and 12 heads of each of 2, 4 and 8 ranks. It is faster up to 32768 tokens. At 65536 and 12 heads calls take 41 ms,
    and the clock scatters the differences by 1.3 to 1.6 %: 0.8 % more on 4 ranks is undecided."""
    lines = [json.loads(text) for text in (RESULTS / "kernel_designs_h200.jsonl").read_text().splitlines()]
    library = {
        (x["seq_len"], x["local_heads"], x["num_ranks"]): x for x in lines if x["form"] == kernel_designs.LIBRARY
    }
    lengths, heads, ranks = (4608, 8192, 16384, 32768, 65536), (3, 6, 12), (2, 4, 8)
    assert set(library) == set(itertools.product(lengths, heads, ranks))
    for (seq_len, *_), x in library.items():
        percent, ci = x["over_stock_percent"], x["over_stock_ci"]
        assert percent < (-0.5 if seq_len < 65536 else 1.0) and percent - ci < 0.5, x
    stock = {(x["seq_len"], x["local_heads"], x["num_ranks"]): x for x in lines if x["form"] == "stock"}
    for shape, line in library.items():
        ratios = [100 * (a / b - 1) for a, b in zip(line["rounds_us"], stock[shape]["rounds_us"], strict=True)]
        assert statistics.median(ratios) == pytest.approx(line["over_stock_percent"], abs=0.02)
