"""The layer benchmark's options, table, plot and captures, without ranks."""

import json

import pytest

from fa_a2a import plot
from fa_a2a.bench import graphs, layer, readme, record, sweep_options, table
from fa_a2a.bench.layer_case import Way
from fa_a2a.cli import main
from fa_a2a.errors import ConfigurationError, FaA2AError


def line(method, ready_us, *, mode="graph", seq_len=4608, date="2026-01-01T00:00:00Z", **fields):
    """A line with the fields that tables and plots read; attention alone takes 100 us, fa_a2a 200."""
    shape = {"world_size": 4, "batch": 1, "seq_len": seq_len, "num_heads": 24, "head_dim": 128, "dtype": "bfloat16"}
    kind = {"kind": "layer", "device": "GPU", "date": date, "content_hash": record.content_hash("layer")}
    ratios = {"vs_attention": ready_us / 100, "vs_fa_a2a": ready_us / 200, "host_us": 30.0, "note": ""}
    held = {"workspace_bytes": 3 << 20, "peak_bytes": None, "bitwise_equal": None, "kernel": "fa4", "transport": "x"}
    return {**kind, **shape, "method": method, "mode": mode, "ready_us": ready_us, **ratios, **held, **fields}


def run(**fields):
    return [line("attention", 100.0, **fields), line("fa_a2a", 200.0, **fields), line("nccl_packed", 340.0, **fields)]


def test_row_shows_what_a_line_says():
    row = table.layer_row(line("fa_a2a", 200.0, bitwise_equal=True, transport="", note="eager only: no"))
    assert " ".join(row.split()) == "4 4608 24 fa_a2a graph 200.0 2.00 - 1.00 30.0 3.0 - equal fa4 - eager only: no"
    widths = [len(text) for text in (table.layer_header(), table.layer_row(line("nccl_packed", 1.0)))]
    assert widths[0] == widths[1]


def test_readme_table_takes_the_newest_run_of_a_shape():
    old = [*run(date="2026-01-01T00:00:00Z"), line("diffusers", 999.0)]
    new = [{**x, "ready_us": x["ready_us"] + 1, "date": "2026-01-02T00:00:00Z"} for x in run()]
    for lines in (old + new, new + old):
        rows = readme.layer_table(lines).splitlines()
        only = "| 4 | 4608 | 24 | - / 101.0 | - / - | - / 201.0 | - / 341.0 | - / - | - / - | - / - |"
        assert rows[2:] == [f"{only} - / 2.00 | - / 1.70 | - / 30.0 |"]


def test_readme_table_compares_with_the_overlapped_form_where_there_is_one():
    rows = readme.layer_table(
        [*run(), line("overlapped", 110.0, vs_attention=1.1, vs_attention_equal_clock=1.01, host_us=20.0)]
    ).splitlines()
    only = "| 4 | 4608 | 24 | - / 100.0 | - / 110.0 | - / 200.0 | - / 340.0 | - / - | - / - | - / - |"
    assert rows[2:] == [f"{only} - / 1.10 | - / 3.09 | - / 20.0 |"]


def test_readme_table_marks_stale_lines_and_leaves_cpus_out():
    lines = [{**x, "content_hash": "old"} for x in run()] + run(seq_len=8192) + run(seq_len=256, device="CPU")
    rows = readme.layer_table(lines).splitlines()
    assert [row[:12] for row in rows[2:4]] == ["| 4† | 4608 ", "| 4 | 8192 |"]
    assert "256" not in readme.layer_table(lines)


def test_readme_table_has_both_modes_in_one_row():
    eager = [{**x, "mode": "eager", "ready_us": 2 * x["ready_us"]} for x in run()]
    (row,) = readme.layer_table(run() + eager).splitlines()[2:]
    assert row.startswith("| 4 | 4608 | 24 | 200.0 / 100.0 | - / - | 400.0 / 200.0 |")


def test_readme_table_stands_between_its_markers():
    text = readme.fill("<!-- layer -->\n<!-- /layer -->", run())
    assert "| 4 | 4608 | 24 | - / 100.0 |" in text


def test_plot(tmp_path):
    lines = run() + run(mode="eager") + run(seq_len=8192)
    paths = plot.draw([{"kind": "other"}, *lines], tmp_path / "layer.png")
    assert paths == [tmp_path / "layer.png"] and paths[0].stat().st_size > 1000
    with pytest.raises(ConfigurationError, match="one device"):
        plot.draw([*lines, line("fa_a2a", 1.0, device="CPU")], tmp_path / "layer.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-lens", "130"], "tokens over 4 ranks"),
        (["--heads", "6"], "heads over 4 ranks"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--kernel", "fa4"], "does not run on device"),
    ],
)
def test_refuses_options_before_it_starts_ranks(options, message, capsys):
    assert main(["sweep", "--layer", "--device", "cpu", "--ranks", "4", *options]) == 1
    assert message in capsys.readouterr().err


def test_refuses_unknown_methods(capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "--layer", "nccl_packed", "mpi"])
    text = capsys.readouterr().err
    assert "mpi" in text and all(name in text for name in sweep_options.LAYER_METHODS)


class OneRank:
    """What `_graphs` asks of a Layer."""

    def __init__(self):
        self.checked = []

    def agree(self, topic, reason):
        return reason

    def check(self, name, call, way):
        self.checked.append(name)


class Graph:
    def replay(self):
        return None


def test_a_method_that_cannot_be_captured_is_eager_only(monkeypatch):
    def refuse():
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    def capture(call, calls):
        assert calls == layer.LAYERS_PER_GRAPH
        return Graph(), call()

    monkeypatch.setattr(graphs, "capture", capture)
    good, bad, rank = Way(lambda: 0, "good", ""), Way(refuse, "bad", ""), OneRank()
    replays, notes = layer._graphs({"fa_a2a": good, "diffusers": bad, "attention": good}, rank)
    assert list(replays) == ["fa_a2a", "attention"]
    assert notes == {"diffusers": "eager only: operation not permitted"}
    assert rank.checked == ["fa_a2a in a CUDA graph"]
    with pytest.raises(FaA2AError, match="fa_a2a could not be captured"):
        layer._graphs({"fa_a2a": bad}, rank)


def test_show_explains_and_says_where_the_lines_are(tmp_path, capsys):
    out = tmp_path / "layer.jsonl"
    out.write_text("".join(json.dumps(x) + "\n" for x in run(device="CPU")))
    layer.show(out, tmp_path / "layer.png")
    text = capsys.readouterr().out
    assert "CPU times say nothing of GPUs" in text and str(out) in text and "layer.png" in text
