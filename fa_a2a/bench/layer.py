"""The whole layer: q, k, v (B, s, H, D) on every rank until out (B, s, H, D) is complete there, with both exchanges.

Methods:
  fa_a2a        UlyssesAttention with the fused exchange: a kernel for the exchange before attention, then attention
  overlapped    UlyssesAttention with the overlapped exchange: one kernel
  nccl          q, k and v exchanged one by one, the same kernel, an all-to-all, a permute; between CPUs gloo moves it
  nccl_packed   q, k, v into one buffer by one copy, an all-to-all, a permute, the same kernel, an all-to-all, a permute
  symm_mem      torch's copies into the peers' symmetric memory, a barrier, the same kernel, copies back, a barrier
  diffusers     diffusers' Ulysses through its dispatch function, with the fastest of its kernels that works here
  attention     the kernel alone on this rank's heads, the better of its tiles
ready_us is a call's time until its output is complete: median over rounds of the slowest rank, methods interleaved.
vs_attention_equal_clock, on GPUs: the ratio of SM cycles in place of times, of the rank with the slowest clock. A GPU
at its power limit lowers its clock where more power is drawn, and changes it from round to round (bench/clock.py). It
is a bound from above, since ranks wait for whichever is slower at the moment.
Modes: eager, one call after another; graph, calls of a CUDA graph that holds LAYERS_PER_GRAPH of them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group import Group, resolve
from ..errors import FaA2AError
from ..lifecycle import close
from . import record, table
from .clock import median_cycles
from .graphs import LAYERS_PER_GRAPH, capture_everywhere
from .layer_case import Layer, Way
from .layer_methods import alone, ways
from .plot_parts import draw_newest
from .sweep import Case
from .timing import TARGET_ROUND_US, Method, Times, interleaved

Calls = dict[str, Callable[[], object]]

_HOST_CALLS = 10


def body(device: torch.device, cases: list[Case], others: tuple[str, ...], out: Path) -> None:
    """What each rank runs. Rank 0 prints a row and appends a line for each method and mode.

    others: the methods to time beside fa_a2a, nccl and attention.
    """
    group, told = resolve(None), set()
    if group.rank == 0:
        print(f"\n{group.size} ranks on {record.device_name(device)}\n{table.layer_header()}", flush=True)
    for case in cases:
        with torch.no_grad():
            lines, skipped = _measure(case, others, group, device)
        close()
        if group.rank:
            continue
        record.append(out, lines)
        for line in lines:
            print(table.layer_row(line), flush=True)
        for remark in skipped:
            if remark not in told:
                print(remark, flush=True)
            told.add(remark)


def _measure(
    case: Case, others: tuple[str, ...], group: Group, device: torch.device
) -> tuple[list[dict[str, Any]], list[str]]:
    """Lines of one case, and what was left out and why. Correctness first: a wrong result ends the run."""
    layer = Layer(case, group, device)
    methods, skipped = ways(layer, others)
    for name, way in methods.items():
        layer.check(name, way.call, way)
    peaks = {name: _peak_bytes(way, layer) for name, way in methods.items()}
    methods |= alone(layer)
    modes: dict[str, Calls] = {"eager": {name: way.call for name, way in methods.items()}}
    notes: dict[str, str] = {}
    if device.type == "cuda":
        modes["graph"], notes = _graphs(methods, layer)
    common = record.environment("layer", device, group.size)
    common |= {name: value for name, value in asdict(case).items() if name not in ("kernel", "profile")}
    common |= {"local_heads": layer.plan.shape.local_heads, "tensor_bytes": layer.plan.shape.tensor_bytes}
    lines = []
    for mode, calls in modes.items():
        per_call = LAYERS_PER_GRAPH if mode == "graph" else 1
        repeats = _repeats(calls["fa_a2a"], per_call, layer)
        named = {name: Method(call) for name, call in calls.items()}
        mhz: Times = {}
        times = interleaved(named, rounds=case.rounds, calls=repeats, device=device, align=layer.align, clocks=mhz)
        cycles = median_cycles(times, mhz)
        median = {name: statistics.median(rounds) / per_call for name, rounds in times.items()}
        tiles = [name for name in median if name.startswith("attention")]
        best = min(tiles, key=lambda name: median[name])
        for name in (name for name in median if name == best or name not in tiles):
            way = methods[name]
            lines.append(
                {
                    **common,
                    "kernel": way.kernel,
                    "method": "attention" if name == best else name,
                    "mode": mode,
                    "transport": way.transport,
                    "tile": (best.partition("_")[2] or "default") if name == best else "",
                    "ready_us": round(median[name], 2),
                    "vs_attention": round(median[name] / median[best], 4),
                    "vs_attention_equal_clock": round(cycles[name] / cycles[best], 4) if cycles else None,
                    "vs_fa_a2a": round(median[name] / median["fa_a2a"], 4),
                    "host_us": _host_us(calls[name], per_call, layer),
                    "workspace_bytes": way.held_bytes,
                    "peak_bytes": peaks.get(name),
                    "bitwise_equal": True if way.exact and name != best else None,
                    "note": notes.get(name, ""),
                    "calls_per_round": repeats * per_call,
                    "rounds_us": [round(x / per_call, 2) for x in times[name]],
                    **({"rounds_mhz": [round(x, 1) for x in mhz[name]]} if mhz else {}),
                }
            )
    return lines, [f"{name} left out: {reason}" for name, reason in skipped.items()]


def _graphs(methods: dict[str, Way], layer: Layer) -> tuple[Calls, dict[str, str]]:
    """Replays of the methods that every rank can capture, checked; and why the others are eager only."""
    replays: Calls = {}
    notes = {}
    for name, way in methods.items():
        captured, reason = capture_everywhere(way.call, LAYERS_PER_GRAPH, f"capture of {name}", layer.agree)
        if captured is None:
            if name == "fa_a2a" or name.startswith("attention"):
                raise FaA2AError(f"a CUDA graph of {name} could not be captured: {reason}")
            notes[name] = f"eager only: {reason}"
            continue
        graph, out = captured
        replays[name] = graph.replay
        if not name.startswith("attention"):
            layer.check(f"{name} in a CUDA graph", _replayed(graph, out), way)
    return replays, notes


def _replayed(graph: torch.cuda.CUDAGraph, out: torch.Tensor) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        graph.replay()
        return out

    return call


def _repeats(call: Callable[[], object], per_call: int, layer: Layer) -> int:
    """Calls per timed region, the same for all methods and ranks."""
    if layer.device.type != "cuda":
        return 1
    return min(40, max(3 if per_call == 1 else 1, math.ceil(TARGET_ROUND_US / layer.slowest_us(call))))


def _host_us(call: Callable[[], object], per_call: int, layer: Layer) -> float | None:
    """What a layer costs the host, in front of an idle device and without waiting for it; the slowest rank's median.
    None between CPU processes, where the host does the work itself."""
    if layer.device.type != "cuda":
        return None
    spent = []
    for _ in range(5):
        layer.align()
        layer.wait()
        dist.barrier()
        layer.wait()
        begin = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        spent.append((time.perf_counter() - begin) * 1e6 / _HOST_CALLS / per_call)
        layer.wait()
    us = torch.tensor([statistics.median(spent)], dtype=torch.float64, device=layer.device)
    dist.all_reduce(us, op=dist.ReduceOp.MAX)
    return round(us.item(), 2)


def _peak_bytes(way: Way, layer: Layer) -> int | None:
    """What torch allocates at most during a call, the output included and what the method holds left out."""
    if layer.device.type != "cuda":
        return None
    layer.wait()
    torch.cuda.reset_peak_memory_stats(layer.device)
    before = torch.cuda.memory_allocated(layer.device)
    way.call()
    layer.wait()
    return torch.cuda.max_memory_allocated(layer.device) - before


def show(out: Path, plot_path: Path) -> None:
    print(
        "\nready: us per layer until the output is complete, with both exchanges, median over rounds of the slowest;\n"
        "x att.: over attention alone, =clock: in cycles of the SMs; x ours: over fa_a2a. host: us of the host per\n"
        "layer. held: buffers kept between calls; peak: what torch allocates beyond them during one."
    )
    lines = record.read(out)
    if not lines:  # /dev/null and the like
        return
    if any(line["device"] == "CPU" for line in lines):
        print("CPU times say nothing of GPUs: on CPU processes this checks that the methods agree, bit by bit.")
    from ..plot import layer

    draw_newest(lines, out, plot_path, layer)
