"""One call of the layer in any situation, its shards, and float64 attention over the gathered inputs beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fa_a2a import UlyssesAttention
from fa_a2a.layout import ExchangeShape


@dataclass(frozen=True)
class Situation:
    """seq: tokens that are sharded; text: rows of replicated text (before them if positive, after them if negative);
    sizes: "equal", "split" (torch.tensor_split's), or the sizes themselves; kv_rows: whole K and V of so many rows."""

    batch: int = 1
    seq: int = 64
    heads: int = 4
    kv_heads: int = 0
    dim: int = 64
    dtype: str = "float32"
    sizes: Any = "equal"
    text: int = 0
    key_lengths: tuple[int, ...] | None = None
    causal: bool = False
    kv_rows: int = 0
    scale: float | None = None
    seed: int = 0

    def on(self, **changes: Any) -> Situation:
        return replace(self, **changes)

    def shape(self, size: int) -> ExchangeShape:
        sizes = None
        if self.sizes != "equal":
            split = [len(part) for part in torch.arange(self.seq).tensor_split(size)]
            sizes = tuple(split if self.sizes == "split" else self.sizes)
        rows = self.seq + abs(self.text)
        return ExchangeShape(self.batch, rows, self.heads, self.dim, size, 4, self.kv_heads, sizes, self.text)

    def whole(self, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """q, k, v of the whole sequence, the same on every rank."""
        generator = torch.Generator(device).manual_seed(self.seed)
        rows, heads = self.seq + abs(self.text), self.heads
        shapes = [(rows, heads)] + 2 * [(self.kv_rows or rows, self.kv_heads or heads)]
        dtype = getattr(torch, self.dtype)
        draw = lambda r, h: torch.randn(self.batch, r, h, self.dim, generator=generator, device=device).to(dtype)
        return [draw(*shape) for shape in shapes]

    def mine(self, x: torch.Tensor, rank: int, size: int, dim: int = 1) -> torch.Tensor:
        """The rows of a whole tensor that the rank holds."""
        return torch.cat([x.narrow(dim, at, n) for at, n in self.shape(size).spans(rank)], dim)

    def shards(self, rank: int, size: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        q, k, v = self.whole(device)
        if self.kv_rows:
            return [self.mine(q, rank, size), k, v]
        return [self.mine(t, rank, size) for t in (q, k, v)]

    def options(self, size: int) -> dict[str, Any]:
        """What the caller passes beside the tensors."""
        found: dict[str, Any] = {"scale": self.scale, "causal": self.causal}
        if self.key_lengths is not None:
            found["key_lengths"] = torch.tensor(self.key_lengths)
        if self.kv_rows:
            return found | {"whole_kv": True}
        if self.sizes != "equal":
            found["shard_sizes"] = list(self.shape(size).sizes)
        if self.text:
            found["replicated_text"] = self.text
        return found

    def reference(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64):
        """(O (B, S, H, D), LSE (B, H, S)) in one process."""
        q, k, v = (t.to(dtype).transpose(1, 2) for t in self.whole(device))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = q @ k.mT * (self.dim**-0.5 if self.scale is None else self.scale)
        at, keys = torch.arange(q.shape[2], device=device), torch.arange(k.shape[2], device=device)
        if self.causal:
            scores.masked_fill_(keys > at[:, None], float("-inf"))
        for entry, length in zip(scores, self.key_lengths or ()):
            entry[:, :, length:] = float("-inf")
        return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def run(situation: Situation, rank: int, size: int, layer: UlyssesAttention, lse: bool = False, device="cpu"):
    """One call whose output was poisoned before, against the reference. Returns (kernel, exchange, reason, O)."""
    parts, options = situation.shards(rank, size, device), situation.options(size)
    first = layer(*parts, **options, return_lse=lse)
    for t in first if lse else (first,):
        t.fill_(float("nan"))
    got = layer(*parts, **options, return_lse=lse)
    out = got[0] if lse else got
    want, want_lse = situation.reference(device, torch.float64 if device == "cpu" else torch.float32)
    limit = TOLERANCE[situation.dtype] * (1 + situation.mine(want, rank, size).abs().max().item())
    assert out.shape == parts[0].shape and out.dtype == parts[0].dtype
    error = (out.to(want.dtype) - situation.mine(want, rank, size)).abs().max().item()
    assert error <= limit, f"{situation}: error {error}, allowed {limit}"
    if lse:
        want_lse = situation.mine(want_lse, rank, size, dim=2)
        assert got[1].shape == want_lse.shape
        assert (got[1].to(want.dtype) - want_lse).abs().max().item() <= 1e-3
    return layer.last_plan.kernel, layer.last_plan.exchange, layer.last_plan.reason, out.clone()
