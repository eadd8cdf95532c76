"""From the times that an instrumented persistent kernel recorded to waiting times by tile."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import torch

_GROUPS = 3  # consumer warpgroups at most


def summary(stamps: torch.Tensor) -> list[dict[str, Any]]:
    """One entry for each place of a tile in its CTA's sequence, us: how long the epilogue waited for the staging (the
    slowest warpgroup; median and maximum over CTAs), and how long the slices took to issue and then to be read."""
    from fa4_a2a.persistent import STAMP_WORDS, Stamp

    tiles: dict[int, list[list[int]]] = defaultdict(list)
    for words in stamps.view(-1, STAMP_WORDS).tolist():
        tiles[words[Stamp.CTA]].append(words)
    waits: dict[int, list[float]] = defaultdict(list)
    issues: dict[int, list[float]] = defaultdict(list)
    reads: dict[int, list[float]] = defaultdict(list)
    for sequence in tiles.values():
        for place, words in enumerate(sorted(sequence, key=lambda w: w[Stamp.WANTED])):
            each = [words[Stamp.GOT + g] - words[Stamp.WANTED + g] for g in range(_GROUPS) if words[Stamp.GOT + g]]
            waits[place].append(max(each) / 1e3)
            if words[Stamp.LAST]:  # the consumer variant sends without times
                issues[place].append((words[Stamp.LAST] - words[Stamp.FULL]) / 1e3)
                reads[place].append((words[Stamp.READ] - words[Stamp.LAST]) / 1e3)
    return [
        {
            "tiles": len(waits[place]),
            "wait_median_us": _us(waits[place], statistics.median),
            "wait_max_us": _us(waits[place], max),
            "issue_median_us": _us(issues[place], statistics.median),
            "read_max_us": _us(reads[place], max),
        }
        for place in sorted(waits)
    ]


def _us(values: list[float], of: Any) -> float | None:
    return round(of(values), 2) if values else None


def text(entries: list[dict[str, Any]]) -> str:
    return ", ".join(f"#{i} {e['wait_median_us']} (max {e['wait_max_us']})" for i, e in enumerate(entries))
