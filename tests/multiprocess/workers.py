"""What the ranks of a test run. Each function takes (rank, size, ...) and is called on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import fa_a2a
from fa_a2a import UlyssesAttention


def coded(batch: int, seq: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, seq, heads, dim, generator=generator).to(dtype) for _ in range(3)]


def shard(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return x.chunk(size, dim=1)[rank]


def inputs(rank, size, *, rows=8, heads=None, batch=1, dim=16, dtype="float32", seed=0) -> list[torch.Tensor]:
    """This rank's q, k, v, `rows` of them."""
    whole = coded(batch, rows * size, heads or 2 * size, dim, getattr(torch, dtype), seed)
    return [shard(t, rank, size).clone() for t in whole]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """float64 attention over the gathered inputs, (B, S, H, D)."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def reference_lse(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """float64 log-sum-exp of the scaled scores, (B, H, S)."""
    q, k = (t.double().transpose(1, 2) for t in (q, k))
    return (q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)).logsumexp(-1)


class Outcome(NamedTuple):
    """What became of a call on one rank: the error's class ("" for none), its text, and how long it took."""

    error: str
    text: str
    seconds: float


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    start = time.monotonic()
    try:
        call(*args, **kwargs)
    except fa_a2a.errors.FaA2AError as error:
        return Outcome(type(error).__name__, str(error), time.monotonic() - start)
    return Outcome("", "", time.monotonic() - start)


def works(rank, size, group=None, exchange="fused", **kind) -> bool:
    """A good call, bitwise equal to the serial path and close to float64."""
    whole = coded(1, 8 * size, 2 * size, 16, torch.float32, seed=99)
    q, k, v = (shard(t, rank, size) for t in whole)
    out = UlyssesAttention(group, kernel="cpu", exchange=exchange, copy=True, timeout_s=20)(q, k, v)
    serial = UlyssesAttention(group, kernel="cpu", exchange="collective", timeout_s=20)(q, k, v)
    want = shard(reference(*whole), rank, size)
    return torch.equal(out, serial) and (out.double() - want).abs().max().item() < 1e-5


def forget(rank, size) -> None:
    """A group as it is before its first call."""
    fa_a2a.close()


def layer(
    rank, size, *, batch=1, seq=128, heads=4, dim=32, dtype="float32", seed=0, kernel="auto", exchange="auto", **options
):
    """One call against the float64 reference; returns (output, largest error)."""
    q, k, v = coded(batch, seq, heads, dim, getattr(torch, dtype), seed)
    attention = UlyssesAttention(kernel=kernel, exchange=exchange, copy=True)
    with torch.no_grad():
        out = attention(*(shard(t, rank, size) for t in (q, k, v)), **options)
    want = shard(reference(q, k, v), rank, size)
    return out, (out.double() - want).abs().max().item()
