"""The exchange before attention alone: q, k, v (B, s, H, D) on every rank until Q, K, V (B, S, h, D) are complete.

Methods:
  st, bulk      our kernel by its two data paths; with options behind a colon: st:ctas=16,threads=512,own_last=1
  copies        three copies for each peer by torch, then the kernel that publishes and waits
  nccl          three all-to-alls, each with a copy before and after it
  nccl_packed   q, k, v copied into one buffer, one all-to-all, one copy after it
Each call ends when every peer's part is here. us is the median over rounds of the slowest rank.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group import resolve
from ..comm.nvshmem import Nvshmem
from ..errors import ConfigurationError
from ..layout import SIGNAL_BYTES
from .exchange_methods import BASELINES, TIMEOUT_S, Call, Case, Exchange, parse
from .record import append, environment
from .timing import TARGET_ROUND_US, Method, interleaved

CALLS_PER_GRAPH = 10


def cases(options: argparse.Namespace) -> list[Case]:
    """Raises ConfigurationError for options that no case can have."""
    for name in ("batch", "rounds", "head_dim"):
        if getattr(options, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    for method in options.methods:
        if method not in BASELINES:
            parse(method)
    rest = (options.head_dim, options.batch, options.dtype, options.rounds, tuple(options.methods))
    return [Case(seq_len, heads, *rest) for heads in options.heads for seq_len in options.seq_lens]


def body(device: torch.device, cases: Sequence[Case], out: Path) -> None:
    """What each rank runs. Rank 0 prints a row and appends a line for each method and mode."""
    group = resolve(None)
    memory = Nvshmem(group, device, TIMEOUT_S)
    signals = memory.allocate(SIGNAL_BYTES, TIMEOUT_S)
    for case in cases:
        exchange = Exchange(case, device, group, memory, signals)
        lines = _measure(exchange)
        exchange.close()
        if group.rank == 0:
            append(out, lines)
            for line in lines:
                print(
                    f"P={line['world_size']} S={line['seq_len']:6} H={line['num_heads']:3} {line['method']:44} "
                    f"{line['mode']:5} {line['us']:8.1f} us  {line['egress_gb_s']:6.1f} GB/s  "
                    f"host {line['host_us']:6.1f} us",
                    flush=True,
                )
    memory.free(signals, TIMEOUT_S)


def _measure(exchange: Exchange) -> list[dict[str, Any]]:
    """Correctness first: a method that moves a byte wrongly ends the run."""
    calls = {name: exchange.call(name) for name in exchange.case.methods}
    for name, call in calls.items():
        exchange.check(name, call)
    graphs = {name: _capture(call) for name, call in calls.items()}
    lines = []
    for mode, methods, per_call in (("eager", calls, 1), ("graph", graphs, CALLS_PER_GRAPH)):
        replays = _repeats(exchange, methods)
        times = interleaved(
            {name: Method(call) for name, call in methods.items()},
            rounds=exchange.case.rounds,
            calls=replays,
            device=exchange.device,
            align=exchange.barrier,
        )
        for name, rounds in times.items():
            us = statistics.median(rounds) / per_call
            fields = {key: value for key, value in asdict(exchange.case).items() if key != "methods"}
            lines.append(
                {
                    **environment("exchange", exchange.device, exchange.group.size),
                    **fields,
                    "method": name,
                    "mode": mode,
                    "bytes_out": exchange.bytes_out,
                    "us": round(us, 2),
                    "egress_gb_s": round(exchange.bytes_out / us / 1e3, 1),
                    "host_us": round(_host_us(exchange, methods[name]) / per_call, 2),
                    "calls_per_round": replays * per_call,
                    "bitwise_equal": True,
                    "rounds_us": [round(x / per_call, 2) for x in rounds],
                }
            )
    return lines


def _capture(call: Call) -> Call:
    """A graph of CALLS_PER_GRAPH calls. Thread-local: NCCL's watchdog asks for events meanwhile."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS_PER_GRAPH):
            call()
    return graph.replay


def _repeats(exchange: Exchange, methods: dict[str, Call]) -> int:
    """Calls per timed region, the same for all methods and ranks."""
    slowest = 0.0
    for call in methods.values():
        call()
        torch.cuda.synchronize(exchange.device)
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize(exchange.device)
        slowest = max(slowest, (time.perf_counter() - begin) * 1e6)
    us = torch.tensor([slowest], dtype=torch.float64, device=exchange.device)
    dist.all_reduce(us, op=dist.ReduceOp.MAX)
    return min(40, max(3, math.ceil(TARGET_ROUND_US / us.item())))


def _host_us(exchange: Exchange, call: Call) -> float:
    """What a call costs this rank's host, with an idle device before it."""
    exchange.barrier()
    torch.cuda.synchronize(exchange.device)
    begin = time.perf_counter()
    for _ in range(10):
        call()
    spent = (time.perf_counter() - begin) * 1e5
    torch.cuda.synchronize(exchange.device)
    return spent
