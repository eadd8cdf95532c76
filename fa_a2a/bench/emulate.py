"""Two GPUs, each standing for one rank of more: `fa-a2a sweep --emulate 8`, and the same with --layer.

Each GPU runs the kernel of one of P ranks: its heads, its P chunks, its own chunk to its own memory, the other P - 1
over the links to memory of the other GPU, which does the same towards this one (emulation.py). What a GPU sends and
receives is then what it would among P, as the path out of a GPU is the same to all of them where a switch joins them
(NV18 on H200).

Not in it: stores that come from P - 1 GPUs at once, and waits for the slowest of P. Serial is not either: no library's
all-to-all runs so. So these lines are of kinds of their own, and carry no speed-up. Outputs are checked first: every
byte that the other GPU stored here, and that nothing else was written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..comm.group import resolve
from ..comm.symmetric import Release
from ..errors import FaA2AError
from ..ops.kernels import Sink
from ..xstage import convergence
from . import forecast, progress, record, table
from .alone import candidates
from .clock import median_cycles
from .emulated_layer import EmulatedLayer
from .emulation import Emulation
from .graphs import LAYERS_PER_GRAPH, agree, capture_everywhere
from .main import title
from .progress import Line, Tick
from .sweep import Case, differences, differences_at_equal_clocks
from .timing import Method, Times, calls_per_round, interleaved, rounded

KIND, LAYER_KIND = "emulated", "emulated_layer"
MODES = ("eager", "graph")


def body(device: torch.device, rows: list[Case], num_ranks: int, layer: bool, out: Path) -> None:
    """What each of the two ranks runs. Rank 0 shows the progress and writes the lines."""
    group = resolve(None)
    main = group.rank == 0
    if main:
        header = table.emulated_layer_header() if layer else table.emulated_header()
        print(f"\n2 of {num_ranks} ranks, each on one {record.device_name(device)}\n{header}", flush=True)

    def measured(row: Case, tick: Tick) -> list[Line]:
        if layer:
            return measure_layer(row, num_ranks, device, tick)
        prediction = forecast.written_down(row, num_ranks, device, out if main else None, measured_with=group.size)
        return [measure(row, num_ranks, device, tick, prediction)]

    shown = partial(map, table.emulated_layer_row if layer else table.emulated_row)
    series = len(MODES) if layer else 1
    lines = progress.run(rows, partial(title, num_ranks), measured, shown, out, main=main, series=series)
    if main and not layer:
        print("\n".join(convergence.report(x | {"world_size": num_ranks} for x in lines)), flush=True)


def measure(case: Case, num_ranks: int, device: torch.device, tick: Tick, prediction: dict[str, Any]) -> dict[str, Any]:
    """The JSON line of one case of attention and the exchange after it; methods are the sweep's. Collective."""
    group = resolve(None)
    here = Emulation(case, num_ranks, group, device)
    with here.guarded():
        qkv = here.work(group.rank)

        def launcher(sink: Sink, release: Release) -> Callable[[], None]:
            launches = here.adapter.launches(*qkv, here.scale, sink, False, release)  # type: ignore[attr-defined]

            def call() -> None:
                for launch in launches:
                    launch()

            return call

        silent, ready = here.release(silent=True), launcher(here.sink, here.release())
        here.check(ready)
        methods = {
            "fused_sender": Method(launcher(here.sink, silent), here.align),
            "fused_local": Method(launcher(here.local, silent)),
            "fused_ready": Method(ready),
        }
        for name, adapter in candidates("fa_only", here.adapter, qkv[0].shape).items():
            methods[name] = Method(partial(adapter.local, *qkv, here.scale, 1, False))
        calls = calls_per_round(methods["fused_local"].call, device)
        mhz: Times = {}
        times = interleaved(
            methods, rounds=case.rounds, calls=calls, device=device, align=here.align, tick=tick, clocks=mhz
        )
    here.close()
    return {
        **_common(KIND, here, num_ranks),
        **differences(times),
        **(differences_at_equal_clocks(times, mhz) if mhz else {}),
        "bitwise_equal": True,
        "calls_per_round": calls,
        "rounds_us": rounded(times),
        **prediction,
    }


def measure_layer(case: Case, num_ranks: int, device: torch.device, tick: Tick) -> list[dict[str, Any]]:
    """A JSON line for each mode, eager and graph: the overlapped layer beside attention alone. Collective."""
    group = resolve(None)
    here = EmulatedLayer(case, num_ranks, group, device)
    lines = []
    with here.guarded():
        here.check(here)
        qkv = here.work(group.rank)
        calls: dict[str, Callable[[], torch.Tensor]] = {"overlapped": here}
        for name, adapter in candidates("attention", here.adapter, qkv[0].shape).items():
            calls[name] = lambda adapter=adapter: adapter.local(*qkv, here.scale, 1, False)[0]  # type: ignore[misc]
        for mode in MODES:
            methods, per_call = {name: Method(call) for name, call in calls.items()}, 1
            if mode == "graph":
                per_call = LAYERS_PER_GRAPH
                for name, call in calls.items():
                    captured, reason = capture_everywhere(call, per_call, f"capture of {name}", partial(agree, group))
                    if captured is None:
                        raise FaA2AError(f"a CUDA graph of {name} could not be captured: {reason}")
                    methods[name] = Method(captured[0].replay)
                here.check(methods["overlapped"].call)
            repeats = calls_per_round(methods["overlapped"].call, device)
            mhz: Times = {}
            times = interleaved(
                methods, rounds=case.rounds, calls=repeats, device=device, align=here.align, tick=tick, clocks=mhz
            )
            times = {name: [us / per_call for us in values] for name, values in times.items()}
            lines.append(_layer_line(here, num_ranks, mode, times, mhz, repeats * per_call))
    here.close()
    return lines


def _layer_line(here: EmulatedLayer, num_ranks: int, mode: str, times: Times, mhz: Times, calls: int) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in times.items()}
    cycles = median_cycles(times, mhz)
    best = min((name for name in median if name != "overlapped"), key=lambda name: median[name])
    return {
        **_common(LAYER_KIND, here, num_ranks),
        "mode": mode,
        "attention_us": round(median[best], 2),
        "overlapped_us": round(median["overlapped"], 2),
        "vs_attention": round(median["overlapped"] / median[best], 4),
        "vs_attention_equal_clock": round(cycles["overlapped"] / cycles[best], 4) if cycles else None,
        "schedule": here.schedule._asdict(),
        "expected_exposed_us": round(here.expected_us, 2),
        "bitwise_equal": True,
        "calls_per_round": calls,
        "rounds_us": rounded(times),
        "rounds_mhz": rounded(mhz, 1),
    }


def _common(kind: str, here: Emulation, num_ranks: int) -> dict[str, Any]:
    return {
        **record.environment(kind, here.device, here.group.size, here.case.kernel),
        **asdict(here.case),
        "num_ranks": num_ranks,
        "local_heads": here.shape.local_heads,
        "remote_bytes": here.shape.tensor_bytes // num_ranks * (num_ranks - 1),  # of one tensor
    }
