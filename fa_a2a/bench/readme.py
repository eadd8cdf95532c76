"""The README's tables, made from result lines and from the code; `fa-a2a plot --readme` writes them between markers.

A marker pair is <!-- name --> ... <!-- /name -->; everything between the two is replaced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from .. import config
from ..errors import ConfigurationError
from .readme_emulated import emulated
from .readme_parts import Lines, cost, is_shown, mark, newest, table
from .support import OVERLAPPED, SUPPORT


def sweep_table(lines: Lines) -> str:
    """Rows of the most heads that were measured; those of fewer stay in the result files."""
    gpu = [line for line in lines if line.get("kind") == "sweep" and is_shown(line)]
    most = max((x["num_heads"] for x in gpu), default=0)
    header = [
        "P",
        "kernel",
        "S",
        "attention",
        "serial",
        "fused",
        "ready",
        "E_res",
        "cost (95 %)",
        "E_res, cost at equal clocks",
        "speed-up",
    ]
    rows = []
    for x in newest(gpu, "sweep", ("world_size", "kernel", "num_heads", "seq_len")):
        if x["num_heads"] < most:
            continue
        rows.append(
            [
                f"{x['world_size']}{mark(x)}",
                *(str(x[name]) for name in ("kernel", "seq_len")),
                f"{x['fa_only_us']:.1f}",
                f"{min(x['serial_us'], x.get('serial_graph_us', math.inf)):.1f}",
                *(f"{x[name]:.1f}" for name in ("fused_sender_us", "fused_ready_us")),
                " / ".join(f"{x[name]:+.1f}" for name in ("e_res_sender_us", "e_res_ready_us")),
                cost(x, "cost_sender"),
                _at_equal_clocks(x),
                f"{x['speedup_sender']:.2f} / {x['speedup_ready']:.2f}",
            ]
        )
    return table(header, rows)


def _at_equal_clocks(line: dict[str, Any]) -> str:
    """Of the sender-visible time; "-" for lines from before clocks were recorded."""
    if "cost_sender_equal_clock_us" not in line:
        return "-"
    return f"{line['e_res_sender_equal_clock_us']:+.1f}, {cost(line, 'cost_sender_equal_clock')}"


def layer_table(lines: Lines) -> str:
    """A row for each shape, us eager / in a graph, from the newest run of that shape, as those are comparable."""
    gpu = [line for line in lines if line.get("kind") == "layer" and is_shown(line)]
    runs: dict[tuple[Any, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    dates: dict[tuple[Any, ...], str] = {}
    for x in gpu:
        key = (x["world_size"], x["num_heads"], x["seq_len"], x["mode"])
        dates[key] = max(dates.get(key, ""), x["date"])
    for x in gpu:
        if dates[x["world_size"], x["num_heads"], x["seq_len"], x["mode"]] == x["date"]:
            runs.setdefault((x["world_size"], x["seq_len"], x["num_heads"]), {})[x["method"], x["mode"]] = x
    methods = {"attention": "attention", "overlapped": "overlapped", "fa_a2a": "fused", "nccl_packed": "NCCL packed"}
    methods |= {"nccl": "NCCL", "symm_mem": "symm. memory", "diffusers": "diffusers"}
    header = ["P", "S", "H", *methods.values(), "/ attention", "over packed", "host"]
    rows = []
    for (ranks, seq_len, heads), run in sorted(runs.items()):
        ours = [run.get(("overlapped", mode), run.get(("fa_a2a", mode))) for mode in _MODES]
        packed = [run.get(("nccl_packed", mode)) for mode in _MODES]
        over = [a["ready_us"] / b["ready_us"] if a and b else None for a, b in zip(packed, ours)]
        rows.append(
            [
                f"{ranks}{max(mark(x) for x in ours if x)}",
                *(str(seq_len), str(heads)),
                *(_pair([run.get((name, mode), {}).get("ready_us") for mode in _MODES], 1) for name in methods),
                _pair([x["vs_attention"] if x else None for x in ours], 2),
                _pair(over, 2),
                _pair([x["host_us"] if x else None for x in ours], 1),
            ]
        )
    return table(header, rows)


def _pair(values: list[float | None], digits: int) -> str:
    return " / ".join("-" if x is None else f"{x:.{digits}f}" for x in values)


def kernel_sentence(lines: Lines) -> str:
    """fa3's speed over fa4's better tile, in one run, by shape."""
    told: dict[int, list[str]] = {}
    for x in newest(lines, "kernel", ("head_dim", "seq_len", "local_heads", "kernel", "build")):
        if x["kernel"] == "fa3" and x["build"] == "default":
            shape = f"({x['seq_len']}, {x['local_heads']})"
            told.setdefault(x["head_dim"], []).append(f"{x['vs_fa4']:.3f}{mark(x)} at {shape}")
    parts = [f"D = {dim}: {', '.join(shapes)}" for dim, shapes in sorted(told.items(), reverse=True)]
    told_by = "Speed of `fa3` over `fa4` on one H200 (`fa-a2a kernel`), paired ratios at (S, heads): "
    return told_by + "; ".join(parts) + "." + _forms_sentence(lines)


def _forms_sentence(lines: Lines) -> str:
    """fa4's persistent form with every store local, beside the better stock tile: the range over heads and ranks."""
    lines = newest(lines, "designs", ("seq_len", "local_heads", "num_ranks", "head_dim", "form"))
    chosen = [x for x in lines if x["form"] == "persistent" and x["over_stock_ci"] is not None]
    if not chosen:
        return ""
    ranges = []
    for seq_len in sorted({x["seq_len"] for x in chosen}):
        rows = [x for x in chosen if x["seq_len"] == seq_len]
        over = sorted(x["over_stock_percent"] for x in rows)
        ranges.append(f"{over[0]:+.1f} to {over[-1]:+.1f} %{max(map(mark, rows))} at {seq_len}")
    most = max(x["over_stock_percent"] + x["over_stock_ci"] for x in chosen)
    return (
        f" The fused `fa4` with all stores local, on one GPU, in time over the better stock tile: {', '.join(ranges)}; "
        f"the highest end of a 95 % interval is {most:+.2f} %."
    )


def dit_table(lines: Lines) -> str:
    """A row for each model and size, from the newest run of it; ms eager / in a graph. difference: to one GPU's output,
    as part of what heads in each other's place make; also of a check without times (`dit --check`)."""
    gpu = [line for line in lines if line.get("device") != "CPU"]
    rows: dict[tuple[Any, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    for kind in ("dit", "dit_check"):
        for x in newest(gpu, kind, ("world_size", "model", "seq_len", "resolution", "method", "mode")):
            key = (x["world_size"], f"{x['model']} {x['resolution']}", x["seq_len"])
            rows.setdefault(key, {})[x["method"] if kind == "dit" else "check", x["mode"]] = x
    header = ["P", "model", "S", "one GPU", "diffusers", "fa_a2a", "x one GPU", "x diffusers", "difference"]
    cells = []
    for (ranks, model, seq_len), run in sorted(rows.items()):
        ours, checks = ([x for (method, _), x in run.items() if method == name] for name in ("fa_a2a", "check"))
        ms = {name: [_ms(run, name, mode) for mode in _MODES] for name in ("single", "diffusers_ulysses", "fa_a2a")}
        compared = [x for x in ours if "wrong_difference" in x] or checks
        parts = [x["max_difference"] / x["wrong_difference"] for x in compared]
        cells.append(
            [
                f"{ranks}{max(mark(x) for x in ours or checks)}",
                *(model, str(seq_len)),
                *(_pair(each, 1) for each in ms.values()),
                *(_ratios(ms[name], ms["fa_a2a"]) for name in ("single", "diffusers_ulysses")),
                f"{max(parts):.3f}" if parts else "-",
            ]
        )
    return table(header, cells)


_MODES = ("eager", "graph")


def _ms(run: dict[tuple[str, str], dict[str, Any]], method: str, mode: str) -> float | None:
    return run[method, mode]["median_ms"] if (method, mode) in run else None


def _ratios(theirs: list[float | None], ours: list[float | None]) -> str:
    return " / ".join("-" if a is None or b is None else f"{a / b:.2f}" for a, b in zip(theirs, ours))


def litmus_table(lines: Lines) -> str:
    """One sentence: the variants that must be sound, then the controls, which need not be."""
    lines = newest(lines, "litmus", ("variant",))
    told = [f"`{x['variant']}`{mark(x)} {x['stale']} in {x['rounds']} rounds" for x in lines]
    sound, controls = ([text for text in told if ("control" in text) == wanted] for wanted in (False, True))
    return f"Stale words: {', '.join(sound)}; without a fence {', '.join(controls)}."


def environment_table(lines: Lines) -> str:
    rows = [[f"`{v.name}`", f"`{v.default}`" if v.default else "", v.meaning] for v in config.VARIABLES]
    return table(["variable", "default", "meaning"], rows)


def support_list(lines: Lines) -> str:
    paths = dict.fromkeys(x.gpu for x in SUPPORT)
    found = [f"*{path}*: {'; '.join(x.what for x in SUPPORT if x.gpu == path)}." for path in paths]
    return f"Shapes, also combined, and with LSE. *overlapped*, on GPUs: {OVERLAPPED}. " + " ".join(found)


TABLES: dict[str, Callable[[Lines], str]] = {
    "sweep": sweep_table,
    "emulated": emulated,
    "layer": layer_table,
    "dit": dit_table,
    "kernel": kernel_sentence,
    "litmus": litmus_table,
    "support": support_list,
    "environment": environment_table,
}


def fill(text: str, lines: Lines) -> str:
    """The README's text with every marked table made anew. Raises ConfigurationError for an unknown or open marker, or
    where there is none."""
    names = re.findall(r"<!-- (\w+) -->", text)
    if not names:
        known = ", ".join(TABLES)
        raise ConfigurationError(f"a README has markers <!-- NAME --> and <!-- /NAME -->, NAME of {known}; got none")
    for name in names:
        if name not in TABLES:
            raise ConfigurationError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        pattern = re.compile(f"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
        if not pattern.search(text):
            raise ConfigurationError(f"marker <!-- {name} --> is not closed by <!-- /{name} -->")
        made = TABLES[name](lines)
        text = pattern.sub(lambda _, name=name, made=made: f"<!-- {name} -->\n{made}\n<!-- /{name} -->", text)  # type: ignore[misc]
    return text
