"""The README's table and sentence of two GPUs that stand for more ranks (emulate.py)."""

from __future__ import annotations

from typing import Any

from .readme_parts import Lines, cost, is_shown, mark, newest, table

_PUBLISHED = ("world_size", "num_heads", "kernel", "seq_len")


def emulated(lines: Lines) -> str:
    return "\n\n".join(filter(None, (emulated_table(lines), emulated_sentence(lines))))


def emulated_table(lines: Lines) -> str:
    """Two GPUs that stand for more, beside what was published for so many ranks and heads: a row for each sequence, for
    each kernel four columns of ours and of theirs. Shapes without a published row stay in the result files."""
    published = {tuple(x[name] for name in _PUBLISHED): x for x in lines if x.get("kind") == "published"}
    ours = {}
    for x in newest(lines, "emulated", ("num_ranks", "kernel", "num_heads", "seq_len")):
        key = (x["num_ranks"], x["num_heads"], x["kernel"], x["seq_len"])
        if key in published and is_shown(x):
            ours[key] = x
    kernels = sorted({kernel for _, _, kernel, _ in ours})[::-1]
    header = ["P", "S"]
    for name in kernels:
        header += [f"{name}: attention / fused", "E_res", "cost at equal clocks (predicted)"]
        header += ["published: attention / fused", "E_res"]
    rows = []
    for ranks, heads, seq_len in sorted({(ranks, heads, seq_len) for ranks, heads, _, seq_len in ours}):
        found = [(ours.get((ranks, heads, k, seq_len)), published.get((ranks, heads, k, seq_len))) for k in kernels]
        cells = [f"{ranks}{max(mark(x) for x, _ in found if x)}", str(seq_len)]
        for mine, theirs in found:
            cells += [_fused(mine), _e_res(mine), _emulated_cost(mine), _fused(theirs), _e_res(theirs)]
        rows.append(cells)
    return table(header, rows)


def _fused(line: dict[str, Any] | None) -> str:
    return "-" if line is None else f"{line['fa_only_us']:.1f} / {line['fused_sender_us']:.1f}"


def _emulated_cost(line: dict[str, Any] | None) -> str:
    if line is None:
        return "-"
    return f"{cost(line, 'cost_sender_equal_clock')} ({_signed(line['predicted_sender_us'])})"


def _e_res(line: dict[str, Any] | None) -> str:
    """Sender-visible, us and as a share of attention."""
    if line is None:
        return "-"
    us = line["fused_sender_us"] - line["fa_only_us"]
    return f"{us:+.1f} ({100 * us / line['fa_only_us']:+.1f} %)"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


def emulated_sentence(lines: Lines) -> str:
    """The overlapped layer on two GPUs that stand for more, in a graph, by ranks and heads; "" without such lines."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for x in newest(lines, "emulated_layer", ("num_ranks", "num_heads", "seq_len", "mode")):
        if x["mode"] == "graph" and is_shown(x):
            found.setdefault((x["num_ranks"], x["num_heads"]), []).append(x)
    told = []
    for (ranks, heads), runs in found.items():
        times = ", ".join(f"{x['overlapped_us']:.0f} ({x['vs_attention']:.2f}){mark(x)}" for x in runs)
        lengths = ", ".join(str(x["seq_len"]) for x in runs)
        told.append(f"P = {ranks}, {heads} heads: {times} at {lengths}")
    if not told:
        return ""
    return f"The overlapped layer measured so, in a graph, us (over attention alone): {'; '.join(told)}."
