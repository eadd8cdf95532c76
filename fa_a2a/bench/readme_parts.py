"""What the README's tables have in common: which lines are shown, and how a figure is written."""

from __future__ import annotations

from typing import Any

from .record import content_hash

Lines = list[dict[str, Any]]


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def mark(line: dict[str, Any]) -> str:
    """A dagger for a figure whose code has changed since it was measured; the README says so once."""
    return "" if line.get("content_hash") == content_hash(line["kind"], line.get("kernel")) else "†"


def newest(lines: Lines, kind: str, key: tuple[str, ...]) -> Lines:
    chosen = {tuple(line[name] for name in key): line for line in lines if line.get("kind") == kind}
    return [chosen[k] for k in sorted(chosen)]


def is_shown(line: dict[str, Any]) -> bool:
    """Of a GPU, and of the shapes that the README's heads speak of; others stay in the result files."""
    shape = (line["head_dim"], line["dtype"], line["batch"])
    return bool(line["device"] != "CPU" and shape == (128, "bfloat16", 1))


def cost(line: dict[str, Any], name: str) -> str:
    """With half of its interval, which one round does not have."""
    us, ci = line[f"{name}_us"], line.get(f"{name}_ci_us")
    return f"{us:+.1f} ± {'-' if ci is None else f'{ci:.1f}'}"
