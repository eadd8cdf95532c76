"""Attention alone on one GPU: fa3, and the builds of it that were asked for, against flash-attn-4's kernel.

us per call, median over rounds in which every kernel is timed once. vs_fa4 is the speed relative to the better of
fa4's tiles, paired round by round: 1.02 is 2 % faster. max_error and torch_error are the largest differences from
attention in float32, of the kernel and of torch's own in the same dtype; more than twice torch's ends the run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ..errors import FaA2AError
from ..native.build import Variant
from ..ops import fa3, kernels
from ..ops.kernels import Qkv
from . import record
from .sweep import _calls
from .timing import Method, interleaved

Variants = list[tuple[tuple[int, int], str]]
_CHECKED_HEADS = 1  # of the largest shapes: the reference holds its whole score matrix


@dataclass(frozen=True)
class Case:
    """One row: the sequence and the heads that one GPU computes."""

    seq_len: int
    local_heads: int
    head_dim: int
    dtype: str
    rounds: int


def body(device: torch.device, cases: list[Case], variants: Variants, out: Path) -> None:
    with tqdm(total=sum(c.rounds + 1 for c in cases), leave=False, unit="round", file=sys.stderr) as bar:
        for case in cases:
            bar.set_description(f"S={case.seq_len} h={case.local_heads}", refresh=False)
            lines = measure(case, variants, device, bar.update)
            record.append(out, lines)
            for line in lines:
                bar.write(_row(line), file=sys.stdout)
            sys.stdout.flush()


def measure(
    case: Case, variants: Variants, device: torch.device, tick: Callable[[], object] = lambda: None
) -> list[dict[str, Any]]:
    """One line for each kernel. Correctness first."""
    adapters = _adapters(case, variants, device)
    generator = torch.Generator(device).manual_seed(1)
    shape = (1, case.seq_len, case.local_heads, case.head_dim)
    dtype = getattr(torch, case.dtype)
    drawn = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3)]
    q, k, v = drawn[0], drawn[1], drawn[2]
    errors, torchs = _errors(adapters, (q, k, v))
    scale = case.head_dim**-0.5
    methods = {name: Method(partial(a.local, q, k, v, scale, 1, False)) for name, a in adapters.items()}
    calls = _calls(next(iter(methods.values())).call, device)
    align = partial(torch.cuda.synchronize, device)
    times = interleaved(methods, rounds=case.rounds, calls=calls, device=device, align=align, tick=tick)
    fa4s = [name for name in times if name.startswith("fa4")]
    best = min(fa4s, key=lambda name: statistics.median(times[name])) if fa4s else None
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
        if best is not None:
            ratios = [theirs / ours for ours, theirs in zip(rounds, times[best], strict=True)]
            line |= {"vs_fa4": round(statistics.median(ratios), 4), "fa4_tile": best.partition(" ")[2] or "default"}
        line |= {"max_error": errors[name], "torch_error": torchs, "calls_per_round": calls}
        lines.append(line | {"rounds_us": [round(x, 2) for x in rounds]})
    return lines


def _adapters(case: Case, variants: Variants, device: torch.device) -> dict[str, Any]:
    """fa3, its other builds, and fa4 with its tiles where it runs here; by name, "kernel build"."""
    dtype = getattr(torch, case.dtype)
    load = partial(kernels.load, device=device, dtype=dtype, head_dim=case.head_dim, with_lse=False, fused=False)
    found: dict[str, Any] = {"fa3": load("fa3")}
    for tile, output in variants:
        name = f"fa3 {tile[0]}x{tile[1]}/{output}"
        found[name] = fa3._FA3(device, Variant(case.head_dim, case.dtype, tile, output))
    if kernels.problem("fa4", device, dtype, case.head_dim, False) is None:
        fa4: Any = load("fa4")
        found |= {"fa4": fa4} | {f"fa4 {name}": adapter for name, adapter in fa4.alternatives().items()}
    return found


def _errors(adapters: dict[str, Any], qkv: Qkv) -> tuple[dict[str, float], float]:
    """Largest error of each kernel and of torch's attention, on the first heads. Raises FaA2AError past twice that."""
    q, k, v = (t[:, :, :_CHECKED_HEADS].transpose(1, 2) for t in qkv)
    want = F.scaled_dot_product_attention(q.float(), k.float(), v.float()).transpose(1, 2)
    torchs = (F.scaled_dot_product_attention(q, k, v).transpose(1, 2).float() - want).abs().max().item()
    errors = {}
    for name, adapter in adapters.items():
        got, _ = adapter.local(*qkv, qkv[0].shape[-1] ** -0.5, 1, False)
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
