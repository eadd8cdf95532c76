"""The options and the tables of the benchmark of whole models, without ranks; and what a graph of one refuses."""

import pytest
import torch

from fa_a2a.bench import dit_options, readme, record, table
from fa_a2a.bench.dit_models import MODELS, Case
from fa_a2a.cli import _parser, main
from fa_a2a.errors import ConfigurationError
from fa_a2a.integrations.graph import GraphedForward


def line(method, median_ms, **fields):
    shape = {"world_size": 4, "model": "flux", "resolution": "1024x1024", "seq_len": 4608, "mode": "graph"}
    kind = {"kind": "dit", "device": "GPU", "content_hash": record.content_hash("dit"), "attention": "fa4"}
    ours = {"max_difference": 0.1, "wrong_difference": 4.0, "workspace_bytes": 3 << 20, "peak_bytes": None, "note": ""}
    return {**kind, **shape, **ours, "method": method, "median_ms": median_ms, **fields}


def run(**fields):
    return [line("single", 180.0, **fields), line("diffusers_ulysses", 90.0, **fields), line("fa_a2a", 60.0, **fields)]


def parse(*options, kind="cuda", counts=(2, 4, 8)):
    return dit_options.parse(_parser().parse_args(["dit", *options]), kind, list(counts))[counts[-1]]


def test_readme_table():
    rows = readme.fill("<!-- dit -->\n<!-- /dit -->", run()).splitlines()
    assert rows[3] == "| 4 | flux 1024x1024 | 4608 | - / 180.0 | - / 90.0 | - / 60.0 | - / 3.00 | - / 1.50 | 0.025 |"
    assert "| 4† |" in readme.dit_table(run(content_hash="old"))
    assert len(readme.dit_table(run(device="CPU")).splitlines()) == 2
    assert " | - / - | - / 90.0 | - / 60.0 | - / - | - / 1.50 |" in readme.dit_table(run()[1:])
    both = readme.dit_table([*run(), *run(mode="eager")])
    assert len(both.splitlines()) == 3 and " 180.0 / 180.0 | 90.0 / 90.0 | 60.0 / 60.0 |" in both


def test_readme_table_takes_differences_from_checks_where_a_run_has_none():
    check = line("fa_a2a", None, kind="dit_check", max_difference=0.2, content_hash=record.content_hash("dit_check"))
    old = run()
    for x in old:
        del x["wrong_difference"]
    assert readme.dit_table([*old, check]).splitlines()[2].endswith("| - / 1.50 | 0.050 |")
    alone = readme.dit_table([*run(), {**check, "world_size": 8}]).splitlines()
    assert alone[3] == "| 8 | flux 1024x1024 | 4608 | - / - | - / - | - / - | - / - | - / - | 0.050 |"


def test_row():
    row = " ".join(table.dit_row(line("fa_a2a", 60.0, speedup_over_single=3.0, note="single eager only: no")).split())
    assert row == "4 flux 1024x1024 4608 fa_a2a graph 60.00 3.00 0.1 0.025 3.0 - fa4 single eager only: no"


def test_default_sizes():
    cases = parse(counts=(2, 4))
    tokens = {case.name: (case.image_tokens, case.joint_text) for case in cases}
    assert tokens == {
        "flux 1024x1024": (4096, 512),
        "flux 2048x2048": (16384, 512),
        "wan 832x480x81": (32760, 0),
        "qwen 1664x928": (6032, 512),
    }
    assert all(MODELS[case.model].config["attention_head_dim"] == 128 and not case.tiny for case in cases)
    assert all(case.tiny for case in parse(kind="cpu", counts=(2, 4)))
    assert [case.model for case in parse(counts=(8,))] == ["flux", "flux", "qwen"]  # Wan's 12 heads
    assert Case("wan", 832, 480, 81).grid == (21, 30, 52)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["sdxl:1024x1024"], "a case is MODEL:WIDTHxHEIGHT"),
        (["flux:1024"], "a case is MODEL:WIDTHxHEIGHT"),
        (["flux:1024xlarge"], "a case is MODEL:WIDTHxHEIGHT"),
        (["flux:8x1024"], "sides of 16 pixels"),
        (["qwen:1328x1328"], "6889 image tokens, which do not divide over 4 ranks"),
        (["flux:1024x1024", "qwen:1328x1328"], "6889 image tokens"),
        (["--text", "30"], "30 text tokens"),
        (["--rounds", "-1"], "--rounds must be at least 1"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--text", "0"], "--text must be at least 1, got 0"),
        (["--modes", ""], "--modes takes eager, graph"),
        (["--modes", "eager,fast"], "--modes takes eager, graph"),
    ],
)
def test_refused_before_ranks_start(options, message, capsys):
    pytest.importorskip("diffusers")
    assert main(["dit", "--device", "cpu", "--ranks", "4", *options]) == 1
    assert message in capsys.readouterr().err


def test_a_graph_needs_a_gpu():
    with pytest.raises(ConfigurationError, match="on a CUDA device"):
        GraphedForward(torch.nn.Linear(2, 2), torch.ones(1, 2))
