"""Attention alone, which the exchange is measured against: the best of a kernel's tiles counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def candidates(name: str, adapter: Any, q_shape: Sequence[int], separator: str = "_") -> Mapping[str, Any]:
    """Adapters for `local` over q (B, S, h, D): `name` as launches go, `name`, separator, ROWSxKEYS with another tile.

    No tile is among them twice. The best median of two series of one tile lies below that of one, by their noise.
    """
    batch, rows, heads, _ = q_shape
    found = {name: adapter}
    if hasattr(adapter, "alternatives"):
        others = adapter.alternatives(rows, batch * heads)
        found |= {f"{name}{separator}{tile}": other for tile, other in others.items()}
    return found
