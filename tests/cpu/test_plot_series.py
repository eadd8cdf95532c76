"""Plots tell configurations apart, name what is common, explain their dashes, and their labels stay legible."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from fa_a2a import plot
from fa_a2a.bench import plot_parts as parts
from fa_a2a.errors import ConfigurationError

pytest.importorskip("matplotlib")

RECORDED = Path(__file__).parents[2] / "benchmarks/results/sweep_h200x2.jsonl"


def line(seq_len=4608, **fields):
    shape = {"world_size": 2, "batch": 1, "seq_len": seq_len, "num_heads": 24, "head_dim": 128, "dtype": "bfloat16"}
    values = {"speedup_sender": 1.3, "speedup_ready": 1.2, "e_res_sender_us": 1.0, "e_res_ready_us": 2.0}
    kind = {"kind": "sweep", "device": "GPU", "date": "2026-01-01T00:00:00Z", "kernel": "fa4"}
    return {**kind, **shape, **values, **fields}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """drawn(lines): the figure that plot.sweep makes."""
    kept = []
    monkeypatch.setattr(parts, "save", lambda figure, plt, path: (figure.tight_layout(), kept.append((figure, plt))))

    def draw(lines):
        plot.sweep(lines, tmp_path / "x.png")
        return kept[-1][0]

    yield draw
    for figure, plt in kept:
        plt.close(figure)


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_uniform_lines(drawn):
    figure = drawn([json.loads(text) for text in RECORDED.read_text().splitlines()])
    left, right = figure.axes
    assert figure._suptitle.get_text() == "NVIDIA H200, head_dim 128, bfloat16, 2026-11-30"
    assert legend(right) == ["fa4, P=2, H=12", "fa4, P=2, H=24", "dashed: ready"]
    assert legend(left)[:2] == ["fa4, P=2, H=12, sender-visible", "fa4, P=2, H=12, ready"]


@pytest.mark.parametrize(
    ("field", "other", "labels", "title"),
    [
        ("dtype", "float16", {"bfloat16", "float16"}, "GPU, head_dim 128, 2026-01-01"),
        ("head_dim", 64, {"head_dim 64", "head_dim 128"}, "GPU, bfloat16, 2026-01-01"),
        ("batch", 2, {"batch 1", "batch 2"}, "GPU, head_dim 128, bfloat16, 2026-01-01"),
    ],
)
def test_what_varies_makes_series_and_leaves_the_title(drawn, field, other, labels, title):
    figure = drawn([line(n, **{field: value}) for n in (4608, 8192) for value in (line()[field], other)])
    assert set(legend(figure.axes[1])[:-1]) == {f"fa4, P=2, H=24, {label}" for label in labels}
    assert figure._suptitle.get_text() == title
    assert [len(x.get_xdata()) for x in figure.axes[1].lines[:4]] == 4 * [2]


def test_a_common_batch_other_than_one_is_said(drawn):
    assert drawn([line(batch=2)])._suptitle.get_text() == "GPU, head_dim 128, bfloat16, batch 2, 2026-01-01"


@pytest.mark.parametrize("lengths", [[64], [64, 65], range(1000, 40000, 500), [1 << n for n in range(5, 18)]])
def test_labels_of_lengths_do_not_overprint(drawn, lengths):
    figure = drawn([line(n) for n in lengths])
    figure.canvas.draw()
    for axis in figure.axes:
        labels = axis.get_xticklabels()
        boxes = [label.get_window_extent() for label in labels]
        assert all(a.x1 < b.x0 for a, b in pairwise(boxes))
        assert labels[-1].get_text() == str(max(lengths))
        assert len(labels) >= min(len(lengths) - 1, 5) or len(lengths) == 1


@pytest.mark.parametrize("fields", [{"dtype": None}, {"speedup_ready": "fast"}, {"seq_len": None}])
def test_a_line_without_its_fields_is_an_error(fields, tmp_path):
    with pytest.raises(ConfigurationError, match=f"'sweep' has no usable {next(iter(fields))}; measure it again"):
        plot.draw([line(**fields)], tmp_path / "x.png")
