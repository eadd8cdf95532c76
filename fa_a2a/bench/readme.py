"""The README's tables, made from result lines and from the code; `fa-a2a plot --readme` writes them between markers.

A marker pair is <!-- name --> ... <!-- /name -->; everything between the two is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .. import config
from ..errors import ConfigurationError
from .record import content_hash
from .support import SUPPORT

Lines = list[dict[str, Any]]


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def _mark(line: dict[str, Any]) -> str:
    """A dagger for a figure whose sources have changed since it was measured."""
    return "" if line.get("content_hash") == content_hash(line["kind"], line.get("kernel")) else "†"


def _footnote(table: str) -> str:
    note = "\n\n† measured before the latest change of the sources it depends on; to be measured again."
    return table + note if "†" in table else table


def _newest(lines: Lines, kind: str, key: tuple[str, ...]) -> Lines:
    chosen = {tuple(line[name] for name in key): line for line in lines if line.get("kind") == kind}
    return [chosen[k] for k in sorted(chosen)]


def sweep_table(lines: Lines) -> str:
    gpu = [line for line in lines if line.get("device") != "CPU"]
    header = ["P", "S", "H", "attention", "serial", "fused", "ready", "E_res", "E_res ready", "cost (95 %)", "speed-up"]
    rows = []
    for x in _newest(gpu, "sweep", ("kernel", "world_size", "num_heads", "seq_len")):
        ci = x["cost_sender_ci_us"]  # None from one round
        rows.append(
            [
                f"{x['world_size']}{_mark(x)}",
                *(str(x[name]) for name in ("seq_len", "num_heads")),
                *(f"{x[name]:.1f}" for name in ("fa_only_us", "serial_us", "fused_sender_us", "fused_ready_us")),
                *(f"{x[name]:+.1f}" for name in ("e_res_sender_us", "e_res_ready_us")),
                f"{x['cost_sender_us']:+.1f} ± {'-' if ci is None else f'{ci:.1f}'}",
                f"{x['speedup_sender']:.2f} / {x['speedup_ready']:.2f}",
            ]
        )
    return _footnote(_table(header, rows))


def layer_table(lines: Lines) -> str:
    """A row for each shape and mode, its cells from the newest run of that shape, as those are comparable."""
    gpu = [line for line in lines if line.get("kind") == "layer" and line.get("device") != "CPU"]
    runs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    dates: dict[tuple[Any, ...], str] = {}
    for x in gpu:
        key = (x["world_size"], x["num_heads"], x["seq_len"], x["mode"])
        if dates.setdefault(key, x["date"]) < x["date"]:
            dates[key], runs[key] = x["date"], {}
        if dates[key] == x["date"]:
            runs.setdefault(key, {})[x["method"]] = x
    methods = ("attention", "overlapped", "fa_a2a", "nccl_packed", "nccl", "symm_mem", "diffusers")
    header = ["P", "S", "H", "mode", *methods, "/ attention", "over packed", "host"]
    rows = []
    for (ranks, heads, seq_len, mode), run in sorted(runs.items()):
        ours, packed = run.get("overlapped", run["fa_a2a"]), run.get("nccl_packed")
        rows.append(
            [
                f"{ranks}{_mark(ours)}",
                *(str(seq_len), str(heads), mode),
                *(f"{run[name]['ready_us']:.1f}" if name in run else "-" for name in methods),
                f"{ours['vs_attention']:.2f}",
                f"{packed['ready_us'] / ours['ready_us']:.2f}" if packed else "-",
                f"{ours['host_us']:.1f}",
            ]
        )
    return _footnote(_table(header, rows))


def dit_table(lines: Lines) -> str:
    """A row for each model and size, from the newest run of it; ms eager / in a graph. difference: to one GPU's output,
    as part of what heads in each other's place make."""
    gpu = [line for line in lines if line.get("device") != "CPU"]
    rows: dict[tuple[Any, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    for x in _newest(gpu, "dit", ("world_size", "model", "seq_len", "resolution", "method", "mode")):
        key = (x["world_size"], f"{x['model']} {x['resolution']}", x["seq_len"])
        rows.setdefault(key, {})[x["method"], x["mode"]] = x
    header = ["P", "model", "S", "one GPU", "diffusers", "fa_a2a", "x one GPU", "x diffusers", "difference"]
    cells = []
    for (ranks, model, seq_len), run in rows.items():
        ours = [x for (method, _), x in run.items() if method == "fa_a2a"]
        ms = {name: [_ms(run, name, mode) for mode in _MODES] for name in ("single", "diffusers_ulysses", "fa_a2a")}
        parts = [x["max_difference"] / x["wrong_difference"] for x in ours if "wrong_difference" in x]
        cells.append(
            [
                f"{ranks}{max(_mark(x) for x in ours)}",
                *(model, str(seq_len)),
                *(" / ".join("-" if x is None else f"{x:.1f}" for x in each) for each in ms.values()),
                *(_ratios(ms[name], ms["fa_a2a"]) for name in ("single", "diffusers_ulysses")),
                f"{max(parts):.3f}" if parts else "-",
            ]
        )
    return _footnote(_table(header, cells))


_MODES = ("eager", "graph")


def _ms(run: dict[tuple[str, str], dict[str, Any]], method: str, mode: str) -> float | None:
    return run[method, mode]["median_ms"] if (method, mode) in run else None


def _ratios(theirs: list[float | None], ours: list[float | None]) -> str:
    return " / ".join("-" if a is None or b is None else f"{a / b:.2f}" for a, b in zip(theirs, ours))


def litmus_table(lines: Lines) -> str:
    """One sentence: the variants that must be sound, then the controls, which need not be."""
    newest = _newest(lines, "litmus", ("variant",))
    told = [f"`{x['variant']}`{_mark(x)} {x['stale']} in {x['rounds']} rounds" for x in newest]
    sound, controls = ([text for text in told if ("control" in text) == wanted] for wanted in (False, True))
    return _footnote(f"Stale words: {', '.join(sound)}; without a fence {', '.join(controls)}.")


def environment_table(lines: Lines) -> str:
    rows = [[f"`{v.name}`", f"`{v.default}`" if v.default else "", v.meaning] for v in config.VARIABLES]
    return _table(["variable", "default", "meaning"], rows)


def support_list(lines: Lines) -> str:
    paths = dict.fromkeys(x.gpu for x in SUPPORT)
    found = [f"*{path}*: {'; '.join(x.what for x in SUPPORT if x.gpu == path)}." for path in paths]
    return "Shapes, also combined, and with LSE. " + " ".join(found)


TABLES: dict[str, Callable[[Lines], str]] = {
    "sweep": sweep_table,
    "layer": layer_table,
    "dit": dit_table,
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
        table = TABLES[name](lines)
        text = pattern.sub(lambda _, name=name, table=table: f"<!-- {name} -->\n{table}\n<!-- /{name} -->", text)  # type: ignore[misc]
    return text
