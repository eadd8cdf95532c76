"""One forward of a diffusion transformer: from the whole inputs on every rank until the whole output is there.

Methods:
  single             one GPU, with the faster of diffusers' kernels (torch's SDPA, cuDNN); every rank runs it alone
  diffusers_ulysses  diffusers' context parallelism with that kernel
  fa_a2a             the same model and plan, set_attention_backend("fa_a2a")
Modes: eager; graph, one CUDA graph of the whole forward. median_ms: median over rounds of the slowest rank, the methods
interleaved. max_difference: of the final output to the single GPU's, eager, kernel of another rounding included;
wrong_difference: the same of a model whose heads stand in each other's place, of which a quarter is too much.
A check takes no times, so ranks may share a GPU for it; its lines are of kind dit_check, for fa_a2a alone.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import lifecycle
from ..comm.group import resolve
from ..errors import FaA2AError
from ..integrations import diffusers as integration
from ..integrations.graph import GraphedForward
from . import record, table
from .dit_case import Bench, Way
from .dit_models import Case, config
from .graphs import first_line
from .timing import Method, interleaved

METHODS = ("single", "diffusers_ulysses", "fa_a2a")
MODES = ("eager", "graph")


def body(device: torch.device, cases: list[Case], modes: tuple[str, ...], timed: bool, out: Path) -> None:
    """What each rank runs. Rank 0 prints a row and appends a line for each method and mode."""
    from diffusers.utils import logging

    logging.set_verbosity_error()  # its warnings that all of this is experimental, once for each call
    warnings.filterwarnings("ignore", category=FutureWarning, module="diffusers")
    group = resolve(None)
    if group.rank == 0:
        print(f"\n{group.size} ranks on {record.device_name(device)}\n{table.dit_header()}", flush=True)
    for case in cases:
        with torch.inference_mode():
            bench = Bench(case, group, device)
            lines = _measure(bench, modes) if timed else _check(bench, modes)
            del bench
        integration.disable()
        lifecycle.close()
        gc.collect()  # the twins are cycles of modules and hooks, and the next model needs their memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if group.rank == 0:
            record.append(out, lines)
            for line in lines:
                print(table.dit_row(line), flush=True)


def _measure(bench: Bench, modes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Lines of one case. Correctness first: a wrong output ends the run."""
    group, case, device = bench.group, bench.case, bench.device
    ways = {"single": bench.single(), "diffusers_ulysses": bench.diffusers(), "fa_a2a": bench.ours()}
    differences = {name: bench.check(name, way.call()) for name, way in ways.items()}
    peaks = {name: _peak_bytes(way, bench) for name, way in ways.items()}
    held = lifecycle.memory_bytes().get(group.name, 0)
    common = record.environment("dit", device, group.size) | _shape(bench)
    lines = []
    for mode in modes:
        calls, notes = _calls(ways, mode, bench)
        methods = {name: Method(call) for name, call in calls.items()}
        times = interleaved(methods, rounds=case.rounds, calls=1, device=device, align=lambda: None)
        median = {name: statistics.median(rounds) / 1e3 for name, rounds in times.items()}
        for name, way in ways.items():
            if name not in median:
                continue
            lines.append(
                {
                    **common,
                    "method": name,
                    "mode": mode,
                    "attention": way.attention,
                    "median_ms": round(median[name], 3),
                    "speedup_over_single": round(median["single"] / median[name], 4),
                    "host_ms": _host_ms(calls[name], bench),
                    "max_difference": differences[name],
                    "wrong_difference": bench.wrong_difference,
                    "max_output": bench.want.float().abs().max().item(),
                    "workspace_bytes": held if name == "fa_a2a" else 0,
                    "peak_bytes": peaks[name],
                    "note": "; ".join(notes.values()),
                    "rounds_ms": [round(x / 1e3, 3) for x in times[name]],
                }
            )
    return lines


def _shape(bench: Bench) -> dict[str, Any]:
    case = bench.case
    return {
        **{"model": case.model, "resolution": f"{case.width}x{case.height}", "frames": case.frames, "batch": 1},
        **{"text_tokens": case.text, "seq_len": case.image_tokens + case.joint_text, "parameters": bench.parameters},
        **{"num_heads": config(case)["num_attention_heads"], "head_dim": config(case)["attention_head_dim"]},
        "dtype": str(bench.dtype).removeprefix("torch."),
    }


def _check(bench: Bench, modes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Lines of one case: differences, eager and of a graph's replay, and memory."""
    way = bench.ours()
    found = {"eager": bench.check("fa_a2a", way.call())}
    peak = _peak_bytes(way, bench)
    if "graph" in modes:
        graph = GraphedForward(way.model, **bench.inputs)
        graph.replay()
        found["graph"] = bench.check("fa_a2a in a CUDA graph", graph.output[0])
    common = record.environment("dit_check", bench.device, bench.group.size) | _shape(bench)
    return [
        {
            **common,
            **{"method": "fa_a2a", "mode": mode, "attention": way.attention, "max_difference": found[mode]},
            **{"wrong_difference": bench.wrong_difference, "max_output": bench.want.float().abs().max().item()},
            **{"workspace_bytes": lifecycle.memory_bytes().get(bench.group.name, 0), "peak_bytes": peak, "note": ""},
        }
        for mode in modes
    ]


def _calls(ways: dict[str, Way], mode: str, bench: Bench) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """What is timed in a mode; and why a method is missing. Replays are checked like the eager outputs."""
    if mode == "eager":
        return {name: way.call for name, way in ways.items()}, {}
    calls: dict[str, Callable[[], object]] = {}
    notes = {}
    for name, way in ways.items():
        graph, reason = None, ""
        try:
            graph = GraphedForward(way.model, **bench.inputs)
        except Exception as error:  # whatever a library's calls raise in a capture
            reason = first_line(error.__context__ or error)
        if reason := bench.agree(f"capture of {name}", reason):
            if name == "fa_a2a":
                raise FaA2AError(f"a CUDA graph of {bench.case.name} with fa_a2a could not be captured: {reason}")
            notes[name] = f"{name} eager only: {reason}"
            continue
        assert graph is not None
        graph.replay()
        bench.check(f"{name} in a CUDA graph", graph.output[0])
        calls[name] = graph.replay
    return calls, notes


def _host_ms(call: Callable[[], object], bench: Bench) -> float | None:
    """How long the host takes to launch a forward on idle GPUs, the slowest rank; None between CPU processes."""
    if bench.device.type != "cuda":
        return None
    return round(bench.slowest_ms(call, to_its_end=False), 3)


def _peak_bytes(way: Way, bench: Bench) -> int | None:
    """What torch allocates at most during a forward beyond weights and inputs, the output included."""
    if bench.device.type != "cuda":
        return None
    bench.wait()
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    way.call()
    bench.wait()
    return torch.cuda.max_memory_allocated(bench.device) - before


def show(out: Path, timed: bool) -> None:
    if timed:
        print("\nms per forward, median over rounds of the slowest rank. x single: speed-up over the model unsharded.")
    print(
        "All outputs agree. diff.: largest difference to the output of the model unsharded; of wrong: as part of what\n"
        "heads in each other's place make, of which a quarter would end the run. held: fa_a2a's symmetric memory;\n"
        f"peak: what torch allocates.\nlines: {out}"
    )
