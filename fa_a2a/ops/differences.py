"""How the configurations of ranks differ, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..errors import PeerMismatchError
from .request import Request


def compare(reports: Sequence[Mapping[str, str | None]]) -> None:
    """Raises PeerMismatchError, the same on every rank, unless all ranks report one request."""
    requests = [json.loads(report["request"] or "{}") for report in reports]
    if len({frozenset(request) for request in requests}) > 1:
        ways = "; ".join(f"rank {rank}: {_way(request)}" for rank, request in enumerate(requests))
        raise PeerMismatchError(f"attention must take the same way on every rank, with the same kind of mask; {ways}")
    differing = [name for name in requests[0] if any(r[name] != requests[0][name] for r in requests)]
    if differing:
        rows = "; ".join(
            f"rank {rank}: " + ", ".join(f"{name}={r[name]}" for name in differing) for rank, r in enumerate(requests)
        )
        raise PeerMismatchError(
            f"shapes, dtypes and options must be the same on every rank; {rows}{_unequal_shards(requests, differing)}"
        )


def _way(request: Mapping[str, Any]) -> str:
    """Of a call of UlyssesAttention its lengths, which may be a mask's; of masked attention its tensors."""
    if "key_lengths" in request:
        return f"no mask, key_lengths={request['key_lengths']}"
    return ", ".join(f"{name}={value}" for name, value in request.items())


def _unequal_shards(requests: list[dict[str, Any]], differing: list[str]) -> str:
    """The way out where the ranks hold different numbers of tokens and nothing else differs."""
    if not _only_tokens(requests[0], differing):
        return ""
    text = abs(requests[0]["replicated_text"])
    sizes = [(r["seq_len"] - text) // len(requests) for r in requests]
    return f"; for shards of these sizes pass shard_sizes={sizes} on every rank"


def from_known(request: Request, known: Sequence[Request]) -> str:
    """How a request differs from the nearest known one, the newest of equals: likely what the others go on with."""
    mine = asdict(request)
    apart: list[dict[str, tuple[Any, Any]]] = []
    for other in reversed(known):
        theirs = asdict(other)
        apart.append({name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]})
    nearest = min(apart, key=len, default={})
    values = ", ".join(f"{name}={here} where a known call has {there}" for name, (here, there) in nearest.items())
    way_out = (
        " (the rows of this rank times the number of ranks); for shards of unequal sizes pass shard_sizes everywhere"
    )
    return f"its arguments are new: {values}{way_out if _only_tokens(mine, nearest) else ''}"


def _only_tokens(request: Mapping[str, Any], differing: Iterable[str]) -> bool:
    """Whether nothing but the number of tokens differs, so that ranks may hold shards of unequal sizes unannounced."""
    return list(differing) == ["seq_len"] and request["shard_sizes"] is None and not request["head_sharded"]
