"""Results as text tables."""

from __future__ import annotations

from typing import Any

Columns = tuple[tuple[str, str, str], ...]

_SWEEP: Columns = (  # header, field, format
    ("P", "world_size", "d"),
    ("S", "seq_len", "d"),
    ("H", "num_heads", "d"),
    ("kernel", "kernel", "s"),
    ("FA us", "fa_only_us", ".1f"),
    ("serial", "serial_us", ".1f"),
    ("in graph", "serial_graph_us", ".1f"),
    ("local", "fused_local_us", ".1f"),
    ("sender", "fused_sender_us", ".1f"),
    ("ready", "fused_ready_us", ".1f"),
    ("E_res snd", "e_res_sender_us", "+.1f"),
    ("E_res rdy", "e_res_ready_us", "+.1f"),
    ("cost snd", "cost_sender_us", "+.1f"),
    ("+-", "cost_sender_ci_us", ".1f"),
    ("=clock", "cost_sender_equal_clock_us", "+.1f"),
    ("+- ", "cost_sender_equal_clock_ci_us", ".1f"),
    ("pred.", "predicted_sender_us", "+.1f"),
    ("x snd", "speedup_sender", ".3f"),
    ("x rdy", "speedup_ready", ".3f"),
    ("bitwise", "bitwise_equal", ""),
)

_EMULATED: Columns = (("P", "num_ranks", "d"), *(x for x in _SWEEP[1:] if not x[1].startswith(("serial", "speedup"))))

# CPU times say nothing of the exchange's cost: no differences and ratios of them
_ON_CPU = ("P", "S", "H", "kernel", "FA us", "serial", "sender", "ready", "bitwise")
_SWEEP_CPU: Columns = tuple(column for column in _SWEEP if column[0] in _ON_CPU)

_LAYER: Columns = (
    ("P", "world_size", "d"),
    ("S", "seq_len", "d"),
    ("H", "num_heads", "d"),
    ("     method", "method", "s"),
    ("mode", "mode", "s"),
    ("ready us", "ready_us", ".1f"),
    ("x att.", "vs_attention", ".2f"),
    ("=clock", "vs_attention_equal_clock", ".3f"),
    ("x ours", "vs_fa_a2a", ".2f"),
    ("host us", "host_us", ".1f"),
    ("held MiB", "workspace_bytes", "MiB"),
    ("peak MiB", "peak_bytes", "MiB"),
    ("bitwise", "bitwise_equal", ""),
    ("         kernel", "kernel", "s"),
    ("             transport", "transport", "s"),
)

_EMULATED_LAYER: Columns = (
    ("P", "num_ranks", "d"),
    ("S", "seq_len", "d"),
    ("H", "num_heads", "d"),
    ("mode", "mode", "s"),
    ("attention", "attention_us", ".1f"),
    ("overlapped", "overlapped_us", ".1f"),
    ("x att.", "vs_attention", ".3f"),
    ("=clock", "vs_attention_equal_clock", ".3f"),
    ("expected us", "expected_exposed_us", ".1f"),
    ("bitwise", "bitwise_equal", ""),
)

_DIT: Columns = (
    ("P", "world_size", "d"),
    ("model", "model", "s"),
    ("resolution", "resolution", "s"),
    ("S", "seq_len", "d"),
    ("           method", "method", "s"),
    ("mode", "mode", "s"),
    ("ms", "median_ms", ".2f"),
    ("x single", "speedup_over_single", ".2f"),
    ("diff.", "max_difference", ".2g"),
    ("of wrong", "of_wrong", ".3f"),
    ("held MiB", "workspace_bytes", "MiB"),
    ("peak MiB", "peak_bytes", "MiB"),
    ("   attention", "attention", "s"),
)


def sweep_header(device: str = "") -> str:
    """device: as in the lines."""
    return _header(_SWEEP_CPU if device == "CPU" else _SWEEP)


def sweep_row(line: dict[str, Any]) -> str:
    return _row(_SWEEP_CPU if line.get("device") == "CPU" else _SWEEP, line)


def emulated_header() -> str:
    return _header(_EMULATED)


def emulated_row(line: dict[str, Any]) -> str:
    return _row(_EMULATED, line)


def emulated_layer_header() -> str:
    return _header(_EMULATED_LAYER)


def emulated_layer_row(line: dict[str, Any]) -> str:
    return _row(_EMULATED_LAYER, line)


def layer_header() -> str:
    return _header(_LAYER)


def layer_row(line: dict[str, Any]) -> str:
    return "  ".join(filter(None, (_row(_LAYER, line), line["note"])))


def dit_header() -> str:
    return _header(_DIT)


def dit_row(line: dict[str, Any]) -> str:
    wrong = line.get("wrong_difference")
    of_wrong = {"of_wrong": line["max_difference"] / wrong} if wrong else {}
    return "  ".join(filter(None, (_row(_DIT, line | of_wrong), line["note"])))


def _header(columns: Columns) -> str:
    return "  ".join(f"{title:>{_width(title)}}" for title, _, _ in columns)


def _row(columns: Columns, line: dict[str, Any]) -> str:
    return "  ".join(f"{_cell(line.get(name), form):>{_width(title)}}" for title, name, form in columns)


def _cell(value: Any, form: str) -> str:
    if value is None or value == "":
        return "-"
    if form == "MiB":
        return f"{value / 1024**2:.1f}"
    return format(value, form) if form else ("equal" if value else "DIFFERS")


def _width(title: str) -> int:
    return max(len(title), 7)
