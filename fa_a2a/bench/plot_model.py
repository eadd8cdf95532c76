"""The model's plot: what remains of the exchange, as a share of attention's time, predicted and measured (after the
paper's figure 11)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from ..errors import FaA2AError
from ..xstage import design_of, predict_cost, shipped_profile
from ..xstage.convergence import OF_ATTENTION
from . import plot_parts as parts
from .plot_parts import Lines

_HOPPER = (9, 0)  # compute capability of the GPUs that profiles are shipped for
_CLOCKED = "cost_sender_equal_clock"
_COSTS = ("cost_sender_us", "cost_ready_us", "e_res_sender_us", "e_res_ready_us", "fa_only_us")


def predicted_lines(lines: Lines) -> Lines:
    """GPU lines of kind "sweep" with a prediction: their own, or, where the line was written without, the model's of
    today for the shipped profile; it knows nothing of the line's times. `predicted_later` tells the two apart."""
    found = []
    for line in lines:
        if line.get("kind") != "sweep" or line.get("device") == "CPU":
            continue
        if line.get("predicted_sender_us") is not None:
            found.append(line | {"predicted_later": False})
        elif (later := _predict(line)) is not None:
            found.append(line | later | {"predicted_later": True})
    return found


def _predict(line: dict[str, Any]) -> dict[str, Any] | None:
    profile = shipped_profile(line["world_size"], line["device"])
    design = design_of(str(line.get("kernel")), _HOPPER)
    if profile is None or design is None:
        return None
    names = ("batch", "seq_len", "num_heads", "head_dim")
    try:
        sizes = {name: line[name] for name in names} | {"num_sms": profile.num_sms}
        shape = design.shape(num_ranks=line["world_size"], **sizes)
        cost = predict_cost(shape, profile, design)
    except FaA2AError:
        return None
    return {"predicted_sender_us": cost.sender_us, "predicted_ready_us": cost.ready_us}


def emulated_lines(lines: Lines) -> Lines:
    """Lines of two GPUs that stand for more ranks and have a prediction, as if measured with as many GPUs."""
    found = (x for x in lines if x.get("kind") == "emulated" and x.get("predicted_sender_us") is not None)
    return [x | {"kind": "sweep", "world_size": x["num_ranks"], "predicted_later": False} for x in found]


def emulated(lines: Lines, path: Path) -> None:
    """`residual` of emulated ranks, which the title tells from as many GPUs."""
    residual(emulated_lines(lines), path, "two GPUs, each standing for one of P ranks")


def residual(lines: Lines, path: Path, remark: str = "") -> None:
    """A panel for the sender-visible time and one for the ready time, in per cent of attention alone: cost with its
    95 % interval (sender-visible: at equal clocks where the line has that), E_res, and the predicted cost as a line; a
    colour for each kernel, P and H. One device a plot. remark: for the title."""
    lines = parts.latest(lines, "sweep", ("kernel",), (*_COSTS, "predicted_sender_us"))
    labels, _ = parts.details(lines)
    plt = parts.pyplot()
    curves = defaultdict(list)
    for line in lines:
        key = (line["kernel"], line["world_size"], line["num_heads"], parts.detail_key(line), line["predicted_later"])
        curves[key].append(line)
    series = list(dict.fromkeys(key[:4] for key in sorted(curves)))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for axis, which, what in zip(axes, ("sender", "ready"), ("sender-visible", "ready"), strict=True):
        axis.axhspan(-100 * OF_ATTENTION, 100 * OF_ATTENTION, color="gray", alpha=0.15)
        named = set()
        for (*name, later), points in sorted(curves.items()):
            points = sorted(points, key=lambda line: line["seq_len"])
            kernel, ranks, heads, details = name
            style = {"color": f"C{series.index(tuple(name))}"}
            label = f"{kernel}, P={ranks}, H={heads}{labels[details]}"
            label = "_" if label in named else label  # of a name that begins so, no legend speaks
            named.add(label)
            lengths = [p["seq_len"] for p in points]
            for field in sorted({_cost_field(p, which) for p in points}):
                chosen = [p for p in points if _cost_field(p, which) == field]
                cost = [_percent(p, p[f"{field}_us"]) for p in chosen]
                interval = [_percent(p, p.get(f"{field}_ci_us") or 0.0) for p in chosen]
                filling = style["color"] if field == _CLOCKED else "white"
                bars = {"fmt": "o", "markersize": 4, "capsize": 2, "markerfacecolor": filling, **style}
                axis.errorbar([p["seq_len"] for p in chosen], cost, interval, label=label, **bars)
                label = "_"
            rest = [_percent(p, p[f"e_res_{which}_us"]) for p in points]
            axis.plot(lengths, rest, "x", alpha=0.6, **style)
            known = [p for p in points if p.get(f"predicted_{which}_us") is not None]
            axis.plot(
                [p["seq_len"] for p in known],
                [_percent(p, p[f"predicted_{which}_us"]) for p in known],
                ":" if later else "-",
                **style,
            )
        axis.plot([], [], "ko", markerfacecolor="white", alpha=0.6, label="cost: remote - local stores, 95 %")
        if any(_cost_field(line, which) == _CLOCKED for line in lines):
            axis.plot([], [], "ko", alpha=0.6, label="the same at equal clocks of the SMs")
        axis.plot([], [], "kx", alpha=0.6, label="E_res: fused - attention alone")
        axis.plot([], [], "k-", label="predicted cost (dotted: after the measurement)")
        axis.axhline(0, color="gray", linewidth=0.8)
        axis.set(title=what, ylabel="per cent of attention alone")
        parts.against_length(axis, lines)
    parts.finish(figure, plt, lines, path, remark)


def _cost_field(line: dict[str, Any], which: str) -> str:
    return _CLOCKED if which == "sender" and line.get(f"{_CLOCKED}_us") is not None else f"cost_{which}"


def _percent(line: dict[str, Any], us: float) -> float:
    return 100 * us / float(line["fa_only_us"])
