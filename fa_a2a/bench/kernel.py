"""Attention alone on one GPU: fa3, and the builds of it that were asked for, against flash-attn-4's kernel.

us per call, median over rounds in which every kernel is timed once. vs_fa4 is the speed relative to the better of
fa4's tiles, paired round by round: 1.02 is 2 % faster. Build "fused" is the form of a fused call of CHUNKS ranks, chunk
by chunk and paced, with all stores local; its vs_fa4 is relative to fa4's of that form. max_error and torch_error are
the largest differences from attention in float32, of the kernel and of torch's own in the same dtype; more than twice
torch's ends the run. tile: what the launch took.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..comm.symmetric import Release
from ..errors import FaA2AError
from ..layout import ExchangeShape
from ..ops import fa3, kernels
from ..ops.fused import local_sink
from ..ops.kernels import Qkv
from ..xstage.speeds import FORM
from ..xstage.tiles import Tile
from . import one_gpu, progress, record
from .alone import candidates

Variants = list[tuple[tuple[int, int], str]]
CHUNKS = 4
_CHECKED_HEADS = 1  # of the largest shapes: the reference holds its whole score matrix
_Call = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One row: the sequence and the heads that one GPU computes."""

    seq_len: int
    local_heads: int
    head_dim: int
    dtype: str
    rounds: int


def body(device: torch.device, cases: list[Case], variants: Variants, out: Path) -> None:
    def title(case: Case) -> str:
        return f"S={case.seq_len} h={case.local_heads}"

    progress.run(cases, title, lambda case, tick: measure(case, variants, device, tick), partial(map, _row), out)


def measure(
    case: Case, variants: Variants, device: torch.device, tick: Callable[[], object] = lambda: None
) -> list[dict[str, Any]]:
    """One line for each kernel and build. Correctness first."""
    adapters = _adapters(case, variants, device)
    qkv = one_gpu.draw(case, device)
    calls = {name: _call(adapter, name, qkv) for name, adapter in adapters.items()}
    errors, torchs = _errors(calls, qkv)
    times, count = one_gpu.times(calls, case, device, tick)
    flops = 4 * case.seq_len**2 * case.head_dim * case.local_heads
    lines = []
    for name, rounds in times.items():
        us = statistics.median(rounds)
        kernel, _, build = name.partition(" ")
        line = {
            **record.environment("kernel", device, 1, kernel),
            "kernel": kernel,
            "build": build or "default",
            "batch": 1,
        }
        line |= asdict(case) | {"us": round(us, 2), "tflops": round(flops / us / 1e6, 1)}
        line["best_tflops"] = round(flops / min(rounds) / 1e6, 1)
        fa4s = [other for other in times if other.startswith("fa4") and (FORM in other) == (build == FORM)]
        if fa4s:
            best = min(fa4s, key=lambda other: statistics.median(times[other]))
            ratios = [theirs / ours for ours, theirs in zip(rounds, times[best], strict=True)]
            line |= {"vs_fa4": round(statistics.median(ratios), 4), "fa4_tile": best.partition(" ")[2] or "default"}
        chunks = CHUNKS if build == FORM else 1
        tile = adapters[name].tile(case.seq_len // chunks, chunks * case.local_heads)
        line["tile"] = f"{tile.rows}x{tile.keys}"
        if build == FORM:
            line["chunks"] = CHUNKS
        line |= {"max_error": errors[name], "torch_error": torchs, "calls_per_round": count}
        lines.append(line | {"rounds_us": [round(x, 2) for x in rounds]})
    return lines


def _adapters(case: Case, variants: Variants, device: torch.device) -> dict[str, Any]:
    """fa3, its other builds, and fa4 with its tiles where it runs here; by name, "kernel build"."""
    dtype = getattr(torch, case.dtype)
    load = partial(kernels.load, device=device, dtype=dtype, head_dim=case.head_dim, with_lse=False)
    found: dict[str, Any] = {"fa3": load("fa3", fused=False)}
    for tile, output in variants:
        name = f"fa3 {tile[0]}x{tile[1]}/{output}"
        found[name] = fa3.FA3(device, case.head_dim, case.dtype, (Tile(*tile),), output)
    chunked = case.seq_len % CHUNKS == 0
    if chunked:
        found[f"fa3 {FORM}"] = found["fa3"]
    if kernels.problem("fa4", device, dtype, case.head_dim, False) is None:
        fa4: Any = load("fa4", fused=chunked)
        found |= candidates("fa4", fa4, (1, case.seq_len, case.local_heads, case.head_dim), " ")
        if chunked:
            found[f"fa4 {FORM}"] = fa4
    return found


def _call(adapter: Any, name: str, qkv: Qkv) -> _Call:
    """Attention of these tensors; returns O, chunk by chunk, each (B, rows, h, D)."""
    batch, seq_len, heads, head_dim = qkv[0].shape
    scale = head_dim**-0.5
    if not name.endswith(FORM):
        return lambda: (adapter.local(*qkv, scale, 1, False)[0],)
    whole = ExchangeShape(batch, seq_len, CHUNKS * heads, head_dim, CHUNKS, qkv[0].itemsize)
    sink = local_sink(whole, qkv[0].dtype, qkv[0].device)
    launches = adapter.launches(*qkv, scale, sink, False, Release.none(qkv[0].device))

    def call() -> tuple[torch.Tensor, ...]:
        for launch in launches:
            launch()
        return sink.o

    return call


def _errors(calls: dict[str, _Call], qkv: Qkv) -> tuple[dict[str, float], float]:
    """Largest error of each kernel and of torch's attention, on the first heads. Raises FaA2AError past twice that."""
    q, k, v = (t[:, :, :_CHECKED_HEADS].transpose(1, 2) for t in qkv)
    want = F.scaled_dot_product_attention(q.float(), k.float(), v.float()).transpose(1, 2)
    torchs = (F.scaled_dot_product_attention(q, k, v).transpose(1, 2).float() - want).abs().max().item()
    errors = {}
    for name, call in calls.items():
        got = torch.cat(call(), dim=1)
        error = (got[:, :, :_CHECKED_HEADS].float() - want).abs().max().item()
        if not error <= 2 * torchs:
            raise FaA2AError(
                f"kernel {name}: error {error:.2e} where torch has {torchs:.2e}; a bug, no time is reported"
            )
        errors[name] = error
    return errors, float(torchs)


def _row(line: dict[str, Any]) -> str:
    name = f"{line['kernel']} {line['build']}"
    ratio = f"  {line['vs_fa4']:.4f} x fa4" if "vs_fa4" in line else ""
    return (
        f"S {line['seq_len']:6} h {line['local_heads']:3} D {line['head_dim']:3}  {name:22} {line['us']:9.1f} us "
        f"{line['tflops']:6.1f} TFLOP/s (best {line['best_tflops']:.1f}){ratio}"
    )
