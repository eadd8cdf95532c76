"""Results as text tables."""

from __future__ import annotations

from typing import Any

_COLUMNS = (  # header, field, format
    ("P", "world_size", "d"),
    ("S", "seq_len", "d"),
    ("H", "num_heads", "d"),
    ("kernel", "kernel", "s"),
    ("FA us", "fa_only_us", ".1f"),
    ("serial", "serial_us", ".1f"),
    ("local", "fused_local_us", ".1f"),
    ("sender", "fused_sender_us", ".1f"),
    ("ready", "fused_ready_us", ".1f"),
    ("E_res snd", "e_res_sender_us", "+.1f"),
    ("E_res rdy", "e_res_ready_us", "+.1f"),
    ("cost snd", "cost_sender_us", "+.1f"),
    ("+-", "cost_sender_ci_us", ".1f"),
    ("pred.", "predicted_sender_us", "+.1f"),
    ("x snd", "speedup_sender", ".3f"),
    ("x rdy", "speedup_ready", ".3f"),
    ("bitwise", "bitwise_equal", ""),
)


def sweep_header() -> str:
    return "  ".join(f"{title:>{_width(title)}}" for title, _, _ in _COLUMNS)


def sweep_row(line: dict[str, Any]) -> str:
    cells = []
    for title, name, form in _COLUMNS:
        value = line.get(name)
        text = "-" if value is None else format(value, form) if form else ("equal" if value else "DIFFERS")
        cells.append(f"{text:>{_width(title)}}")
    return "  ".join(cells)


def _width(title: str) -> int:
    return max(len(title), 7)
