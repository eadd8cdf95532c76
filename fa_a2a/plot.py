"""Plots made from result lines, and from nothing else. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from .errors import ConfigurationError, UnsupportedError


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("plots need matplotlib; pip install 'fa_a2a[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _latest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last line of each configuration."""
    key = ("device", "world_size", "kernel", "batch", "seq_len", "num_heads", "head_dim", "dtype")
    return list({tuple(line[name] for name in key): line for line in lines}.values())


def sweep(lines: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over serial and E_res against sequence length, one curve for each kernel, P and H. One device a plot."""
    lines = _latest([line for line in lines if line.get("kind") == "sweep"])
    devices = {line["device"] for line in lines}
    if len(devices) != 1:
        raise ConfigurationError(f"a sweep plot shows one device, got lines of {sorted(devices) or 'none'}")
    plt = _pyplot()
    curves = defaultdict(list)
    for line in lines:
        curves[line["kernel"], line["world_size"], line["num_heads"]].append(line)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for index, ((kernel, ranks, heads), points) in enumerate(sorted(curves.items())):
        points.sort(key=lambda line: line["seq_len"])
        lengths, color = [p["seq_len"] for p in points], f"C{index}"
        label = f"{kernel}, P={ranks}, H={heads}"
        left.plot(lengths, [p["speedup_sender"] for p in points], "o-", color=color, label=f"{label}, sender-visible")
        left.plot(lengths, [p["speedup_ready"] for p in points], "s--", color=color, label=f"{label}, ready")
        right.plot(lengths, [p["e_res_sender_us"] for p in points], "o-", color=color, label=label)
        right.plot(lengths, [p["e_res_ready_us"] for p in points], "s--", color=color)
    left.axhline(1, color="gray", linewidth=0.8)
    right.axhline(0, color="gray", linewidth=0.8)
    left.set_ylabel("speed-up over attention, then all-to-all")
    right.set_ylabel("E_res = fused - attention alone (us)")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({p["seq_len"] for p in lines}), [str(s) for s in sorted({p["seq_len"] for p in lines})])
        axis.minorticks_off()
        axis.set_xlabel("sequence length")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    (device,) = devices
    dates = sorted({line["date"][:10] for line in lines})
    what = f"{device}, head_dim {lines[0]['head_dim']}, {lines[0]['dtype']}, {dates[-1]}"
    if device == "CPU":
        what += ": processes on one CPU, a check of correctness, not of speed"
    figure.suptitle(what, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
