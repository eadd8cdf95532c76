"""What the plots of lines share: which lines, one name for each series, the axis of lengths, the file."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, FaA2AError, UnsupportedError
from . import checks

Lines = list[dict[str, Any]]

_SHAPE = ("world_size", "batch", "seq_len", "num_heads", "head_dim")
_DETAILS = {"dtype": "{}", "head_dim": "head_dim {}", "batch": "batch {}"}
_POINT_INCHES = 1 / 72


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("plots need matplotlib; pip install 'fa_a2a[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def check(path: Path, option: str, asked: bool = True) -> None:
    """ConfigurationError unless an image can be written there. Without matplotlib: UnsupportedError if `asked`, else
    nothing, as a plot beside the results is then left out."""
    try:
        plt = pyplot()
    except UnsupportedError:
        if asked:
            raise
        return
    known = sorted(plt.matplotlib.backend_bases.FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigurationError(f"{option} must end in one of .{', .'.join(known)}; got {path}")
    checks.writable(path, option)


def latest(lines: Lines, kind: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Lines:
    """The last line of each configuration of this kind. ConfigurationError for a line that lacks a field, and unless
    all are of one device."""
    lines = [line for line in lines if line.get("kind") == kind]
    words = ("device", "date", "dtype", *words)
    for line in lines:
        wrong = [name for name in words if not isinstance(line.get(name), str)]
        wrong += [name for name in (*_SHAPE, *numbers) if not isinstance(line.get(name), (int, float))]
        if wrong:
            raise ConfigurationError(f"a line of kind {kind!r} has no usable {', '.join(wrong)}; measure it again")
    devices = sorted({line["device"] for line in lines})
    if len(devices) != 1:
        raise ConfigurationError(f"such a plot shows one device, got lines of {', '.join(devices) or 'none'}")
    key = (*words, *_SHAPE)
    return list({tuple(line[name] for name in key if name != "date"): line for line in lines}.values())


def details(lines: Lines) -> tuple[dict[tuple[Any, ...], str], str]:
    """What tells series apart besides the fields that every label shows: label by `detail_key`; and the words for the
    title, of what is the same in all lines."""
    keys = {detail_key(line) for line in lines}
    columns = list(zip(*keys, strict=True))
    varying = [len(set(column)) > 1 for column in columns]
    forms = list(_DETAILS.values())
    labels = {
        key: "".join(f", {f.format(x)}" for f, x, v in zip(forms, key, varying, strict=True) if v) for key in keys
    }
    first = dict(zip(_DETAILS, next(iter(keys)), strict=True))
    same = dict(zip(_DETAILS, (not v for v in varying), strict=True))
    common = [_DETAILS[name].format(first[name]) for name in ("head_dim", "dtype") if same[name]]
    if same["batch"] and first["batch"] != 1:
        common.append(_DETAILS["batch"].format(first["batch"]))
    return labels, ", ".join(common)


def detail_key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in _DETAILS)


def thinned(lengths: list[int], inches: float, font_points: float = 10.0) -> list[int]:
    """Of sorted lengths on a logarithmic axis this wide, the first, the last, and those whose labels fit between."""
    span = math.log2(lengths[-1] / lengths[0]) * 1.1 or 1.0  # with the axis's margins

    def apart(a: int, b: int) -> bool:
        digits = (len(str(a)) + len(str(b))) / 2 + 1
        return math.log2(b / a) / span * inches >= 0.65 * digits * font_points * _POINT_INCHES

    last = lengths[-1]
    shown = [lengths[0]]
    for length in lengths[1:-1]:
        if apart(shown[-1], length) and apart(length, last):
            shown.append(length)
    return shown if last == lengths[0] else [*(shown if apart(shown[-1], last) else []), last]


def against_length(axis: Any, lines: Lines) -> None:
    lengths = sorted({p["seq_len"] for p in lines})
    box, figure = axis.get_position(), axis.get_figure()
    ticks = thinned(lengths, 0.9 * box.width * figure.get_figwidth())
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(s) for s in ticks])
    axis.minorticks_off()
    axis.set_xlabel("sequence length")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def finish(figure: Any, plt: Any, lines: Lines, path: Path, remark: str = "") -> None:
    device = lines[0]["device"]
    parts = (device, details(lines)[1], max(p["date"][:10] for p in lines), remark)
    what = ", ".join(filter(None, parts))
    if device == "CPU":
        what += ": processes on one CPU, a check of correctness, not of speed"
    figure.suptitle(what, fontsize=10)
    save(figure, plt, path)


def save(figure: Any, plt: Any, path: Path) -> None:
    figure.tight_layout()
    checks.writable(path, "the plot")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_newest(lines: Lines, out: Path, path: Path, draw: Callable[[Lines, Path], None]) -> None:
    """The end of a run: where its lines are, and a plot of those of the newest one's device, or why there is none."""
    print(f"lines: {out}")
    try:
        newest = lines[-1]["device"]
        draw([line for line in lines if line["device"] == newest], path)
        print(f"plot: {path}")
    except UnsupportedError as error:
        print(f"no plot: {error}")
    except FaA2AError as error:
        print(f"no plot: {error}", file=sys.stderr)
