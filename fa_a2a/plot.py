"""Plots made from result lines, and from nothing else. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from .bench import plot_model
from .bench import plot_parts as parts
from .bench.plot_parts import check as check
from .errors import ConfigurationError
from .xstage import burst_gap as bg
from .xstage.curves import periods
from .xstage.fit import Calibration, StoreFit, fit
from .xstage.samples import KIND as CALIBRATE
from .xstage.samples import read_runs

_MIB = 1024**2


def draw(lines: list[dict[str, Any]], path: Path) -> list[Path]:
    """A plot for each kind of line there is: of the first kind at `path`, of the others beside it, and one of
    the sweep's costs as predicted. Returns where.

    Of emulated ranks there is the second kind of plot alone. ConfigurationError where no line can be plotted.
    """
    plots = {"sweep": sweep, "layer": layer, CALIBRATE: calibration, "emulated": plot_model.emulated}
    kinds = {str(line.get("kind")) for line in lines}
    found = [kind for kind in plots if kind in kinds]
    if not plot_model.emulated_lines(lines) and "emulated" in found:
        found.remove("emulated")
        if not found:
            rule = "lines of kind emulated are plotted beside the model's predictions, got none with one"
            raise ConfigurationError(f"{rule}; measure with a profile of this GPU (fa-a2a calibrate)")
    if not found:
        got = ", ".join(sorted(kinds)) or "none"
        raise ConfigurationError(f"plots are made of lines of kind {' or '.join(plots)}, got {got}; name such a file")
    paths = {kind: path if kind == found[0] else path.with_stem(f"{path.stem}_{kind}") for kind in found}
    for kind, target in paths.items():
        plots[kind](lines, target)
    drawn = list(paths.values())
    if "sweep" in paths and (predicted := plot_model.predicted_lines(lines)):
        drawn.append(path.with_stem(f"{path.stem}_model"))
        plot_model.residual(predicted, drawn[-1])
    return drawn


def sweep(lines: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over serial and E_res against sequence length, one curve for each kernel, P, H and whatever else of the
    shapes differs. One device a plot."""
    values = ("speedup_sender", "speedup_ready", "e_res_sender_us", "e_res_ready_us")
    lines = parts.latest(lines, "sweep", ("kernel",), values)
    labels, _ = parts.details(lines)
    plt = parts.pyplot()
    curves = defaultdict(list)
    for line in lines:
        curves[line["kernel"], line["world_size"], line["num_heads"], parts.detail_key(line)].append(line)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for index, ((kernel, ranks, heads, details), points) in enumerate(sorted(curves.items())):
        points.sort(key=lambda line: line["seq_len"])
        lengths, color = [p["seq_len"] for p in points], f"C{index}"
        label = f"{kernel}, P={ranks}, H={heads}{labels[details]}"
        left.plot(lengths, [p["speedup_sender"] for p in points], "o-", color=color, label=f"{label}, sender-visible")
        left.plot(lengths, [p["speedup_ready"] for p in points], "s--", color=color, label=f"{label}, ready")
        right.plot(lengths, [p["e_res_sender_us"] for p in points], "o-", color=color, label=label)
        right.plot(lengths, [p["e_res_ready_us"] for p in points], "s--", color=color)
    right.plot([], [], "s--", color="gray", label="dashed: ready")
    left.axhline(1, color="gray", linewidth=0.8)
    right.axhline(0, color="gray", linewidth=0.8)
    left.set_ylabel("speed-up over attention, then all-to-all")
    right.set_ylabel("E_res = fused - attention alone (us)")
    for axis in (left, right):
        parts.against_length(axis, lines)
    parts.finish(figure, plt, lines, path)


_WAYS = {"overlapped": "fa_a2a, overlapped", "fa_a2a": "fa_a2a, fused"}


def layer(lines: list[dict[str, Any]], path: Path) -> None:
    """Ready time of a layer over attention alone against sequence length: a panel for each mode, a colour for each
    method, a line style for each shape but for the length. One device a plot."""
    lines = parts.latest(lines, "layer", ("method", "mode"), ("vs_attention",))
    lines = [line for line in lines if line["method"] != "attention"]
    if not lines:
        raise ConfigurationError(
            "a plot of layers shows methods beside attention, got attention alone; name other lines"
        )
    labels, _ = parts.details(lines)
    plt = parts.pyplot()
    modes, methods = (sorted({line[name] for line in lines}) for name in ("mode", "method"))
    shapes = sorted({_shape(line) for line in lines})
    figure, axes = plt.subplots(1, len(modes), figsize=(max(9, 5.5 * len(modes)), 4), squeeze=False)
    curves = defaultdict(list)
    for line in lines:
        curves[line["mode"], line["method"], _shape(line)].append(line)
    for (mode, method, shape), points in sorted(curves.items()):
        points.sort(key=lambda line: line["seq_len"])
        style = {"color": f"C{methods.index(method)}", "linestyle": ("-", "--", ":", "-.")[shapes.index(shape) % 4]}
        label = f"{_WAYS.get(method, method)}, P={shape[0]}, H={shape[1]}{labels[shape[2]]}"
        xs, ys = [p["seq_len"] for p in points], [p["vs_attention"] for p in points]
        axes[0][modes.index(mode)].plot(xs, ys, marker="o", label=label, **style)
    for mode, axis in zip(modes, axes[0], strict=True):
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set(title=mode, ylabel="layer until ready / attention alone")
        parts.against_length(axis, [line for line in lines if line["mode"] == mode])
    parts.finish(figure, plt, lines, path)


def _shape(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["world_size"], line["num_heads"], parts.detail_key(line)


def calibration(lines: list[dict[str, Any]], path: Path) -> None:
    """The newest run among the lines: the four panels of the paper's figure 3, measured points, the model's curves."""
    found = fit(read_runs(lines)[-1])
    plt = parts.pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    for color, store in enumerate(found.stores.values()):
        _gap_panels(axes[0][0], axes[0][1], found, store, f"C{color}")
        _isolated_panel(axes[1][0], found, store, f"C{color}")
        _rate_panel(axes[1][1], found, store, f"C{color}")
    volumes = [0.0, max(s.volume_bytes for s in found.run.select("zero_gap"))]
    drains = [bg.drain_us(volume_bytes=v, rate_gb_s=found.rate_gb_s.value) for v in volumes]
    label = f"V/R, R = {found.rate_gb_s.value:.0f} GB/s"
    axes[1][1].plot([v / _MIB for v in volumes], drains, "-", color="gray", label=label)
    titles = (
        ("a", "periodic bursts: issue time", "gap G (us)", "period - gap (us)"),
        ("b", "periodic bursts: period", "gap G (us)", "period (us)"),
        ("c", "isolated bursts: slowest block", "volume V (MiB)", "issue time (us)"),
        ("d", "zero gap: period", "volume V (MiB)", "period (us)"),
    )
    for axis, (letter, title, x, y) in zip(axes.flat, titles, strict=True):
        axis.set(title=f"({letter}) {title}", xlabel=x, ylabel=y)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0][1].set_ylim(top=1.4 * axes[0][1].get_ylim()[1])  # its legend is long
    run = found.run
    figure.suptitle(f"{run.device} x {run.num_ranks}, {run.num_sms} SMs, {run.date[:10]}; lines: X-Stage", fontsize=10)
    parts.save(figure, plt, path)


def _gap_panels(left: Any, right: Any, found: Calibration, store: StoreFit, color: str) -> None:
    name = store.store
    left.plot(
        [p.gap_us for p in store.max_law],
        [p.measured_us - p.gap_us for p in store.max_law],
        "o",
        color=color,
        label=name,
    )
    left.plot([p.gap_us for p in store.max_law], [p.predicted_us - p.gap_us for p in store.max_law], "-", color=color)
    control = periods(found.run.select("gap", store=name, traffic="local"))
    if control:
        label = f"{name}, local"
        left.plot([p.gap_us for p in control], [p.issue_us for p in control], "x", color=color, alpha=0.5, label=label)
    right.plot([p.gap_us for p in store.max_law], [p.measured_us for p in store.max_law], "o", color=color, label=name)
    right.plot([p.gap_us for p in store.max_law], [p.predicted_us for p in store.max_law], "-", color=color)
    for points, mark, what in (
        (store.steady_law, "+", "while all blocks run"),
        (store.coupled_law, "^", "fence after each burst, in step"),
        (store.free_law, "1", "fence after each burst, on their own"),
    ):
        if points:
            gaps, measured = [p.gap_us for p in points], [p.measured_us for p in points]
            right.plot(gaps, measured, mark, color=color, alpha=0.5, label=f"{name}, {what}")
    coupled = store.coupled_law or store.free_law
    right.plot([p.gap_us for p in coupled], [p.predicted_us for p in coupled], "--", color=color, alpha=0.5)


def _isolated_panel(axis: Any, found: Calibration, store: StoreFit, color: str) -> None:
    """The band: max(local control, (V - Q)/R) over the range of Q."""
    points = store.isolated
    volumes = [p.volume_bytes / _MIB for p in points]
    spread = [[p.issue_us.value - p.issue_us.low for p in points], [p.issue_us.high - p.issue_us.value for p in points]]
    label = f"{store.store}, Q {store.capacity}"
    axis.errorbar(volumes, [p.issue_us.value for p in points], spread, fmt="o", color=color, label=label)
    axis.plot(volumes, [p.local_us for p in points], "x", color=color, alpha=0.5, label=f"{store.store}, local")
    if store.capacity.high_bytes is None:
        return
    low, high = (
        [
            bg.isolated_issue_us(
                volume_bytes=p.volume_bytes, rate_gb_s=found.rate_gb_s.value, floor_us=p.local_us, capacity_bytes=q
            )
            for p in points
        ]
        for q in (store.capacity.high_bytes, store.capacity.low_bytes)
    )
    axis.fill_between(volumes, low, high, color=color, alpha=0.2)


def _rate_panel(axis: Any, found: Calibration, store: StoreFit, color: str) -> None:
    """Marks by the number of blocks: the same volume from fewer blocks must lie on the same line."""
    points = periods(found.run.select("zero_gap", store=store.store, traffic="all_to_all"))
    for mark, ctas in zip("osD^v", sorted({p.sample.num_ctas for p in points}, reverse=True), strict=False):
        mine = [p for p in points if p.sample.num_ctas == ctas]
        volumes, label = [p.sample.volume_bytes / _MIB for p in mine], f"{store.store}, {ctas} blocks"
        axis.plot(volumes, [p.median_us for p in mine], mark, color=color, fillstyle="none", label=label)
    one = periods(found.run.select("zero_gap", store=store.store, traffic="one_sender", num_ctas=found.run.num_sms))
    if one:
        volumes, label = [p.sample.volume_bytes / _MIB for p in one], f"{store.store}, one rank sending"
        axis.plot(volumes, [p.median_us for p in one], "+", color=color, label=label)
