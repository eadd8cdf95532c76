"""The plot of predicted and measured costs: what it shows comes from the lines or from the model, and says which."""

import json
from pathlib import Path

import pytest

from fa_a2a import plot
from fa_a2a.bench import plot_model
from fa_a2a.bench import plot_parts as parts
from fa_a2a.xstage import design, load_profile, predict_cost

pytest.importorskip("matplotlib")

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def recorded(name):
    return [json.loads(text) for text in (RESULTS / name).read_text().splitlines()]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(parts, "save", lambda figure, plt, path: kept.append((figure, plt)))

    def draw(lines):
        plot_model.residual(plot_model.predicted_lines(lines), tmp_path / "x.png")
        return kept[-1][0]

    yield draw
    for figure, plt in kept:
        plt.close(figure)


def test_own_predictions_come_first_and_others_are_the_models():
    line = next(x for x in recorded("sweep_h200x2.jsonl") if x["kind"] == "sweep")
    line |= {"predicted_sender_us": 1.5, "predicted_ready_us": 5.0}
    (own,) = plot_model.predicted_lines([line])
    assert (own["predicted_sender_us"], own["predicted_later"]) == (1.5, False)
    (later,) = plot_model.predicted_lines([line | {"predicted_sender_us": None}])
    kernel = design("persistent")
    shape = kernel.shape(batch=1, seq_len=4608, num_heads=line["num_heads"], head_dim=128, num_ranks=2)
    cost = predict_cost(shape, load_profile("h200x2"), kernel)
    assert (later["predicted_sender_us"], later["predicted_ready_us"]) == (cost.sender_us, cost.ready_us)
    assert later["predicted_later"]
    unknown = line | {"predicted_sender_us": None}
    for fields in ({"world_size": 8}, {"device": "CPU"}, {"kernel": "torch"}, {"kind": "layer"}, {"head_dim": 96}):
        assert plot_model.predicted_lines([unknown | fields]) == []


def test_both_panels(drawn):
    lines = [line for line in recorded("stock_kernel/sweep_h200x4.jsonl") if line["kind"] == "sweep"]
    sender, ready = drawn(lines).axes
    assert (sender.get_title(), ready.get_title()) == ("sender-visible", "ready")
    for axis, which in ((sender, "sender"), (ready, "ready")):
        solid = [curve for curve in axis.lines if curve.get_linestyle() == "-" and len(curve.get_xdata()) == len(lines)]
        want = [100 * line[f"predicted_{which}_us"] / line["fa_only_us"] for line in lines]
        assert any(list(curve.get_ydata()) == pytest.approx(want) for curve in solid)
        texts = [text.get_text() for text in axis.get_legend().get_texts()]
        assert "fa4, P=4, H=24" in texts and "cost: remote - local stores, 95 %" in texts


def test_sender_visible_costs_are_at_equal_clocks_where_that_is_known(drawn):
    lines = [line for line in recorded("sweep_h200x2.jsonl") if line["kind"] == "sweep" and line["num_heads"] == 24]
    assert all("cost_sender_equal_clock_us" in line for line in lines)
    lines[0].pop("cost_sender_equal_clock_us")
    sender, ready = drawn(lines).axes

    def costs(axis):
        bars = [container.lines[0] for container in axis.containers]
        return {bar.get_markerfacecolor() == "white": list(bar.get_ydata()) for bar in bars}

    want = [100 * line["cost_sender_equal_clock_us"] / line["fa_only_us"] for line in lines[1:]]
    in_time = 100 * lines[0]["cost_sender_us"] / lines[0]["fa_only_us"]
    assert costs(sender) == {False: pytest.approx(want), True: pytest.approx([in_time])}
    assert costs(ready) == {True: pytest.approx([100 * x["cost_ready_us"] / x["fa_only_us"] for x in lines])}


def test_the_command_draws_it_beside_the_sweep(tmp_path):
    lines = recorded("sweep_h200x2.jsonl")
    assert plot.draw(lines, tmp_path / "a.png") == [tmp_path / "a.png", tmp_path / "a_model.png"]
    assert (tmp_path / "a_model.png").stat().st_size > 10000
    alone = [line | {"device": "CPU"} for line in lines]
    assert plot.draw(alone, tmp_path / "b.png") == [tmp_path / "b.png"]
