"""What the exchange costs inside the persistent attention kernel: by build, order of tiles, pace, and way of release.

For each shape the stock kernel and each configuration of the persistent one, us per call, interleaved round by round:
  local         every store local
  sender        storing into the peers; waiting only after the last call of a round
  ready_small   a signal kernel behind each call publishes and waits
  ready_inside  the kernel's last CTA publishes and waits
cost_x = x - local of the same configuration, paired, with the half width of its 95 % interval. over_fa_us = local minus
the stock kernel on plain tensors. Every configuration's output is compared bitwise with the stock kernel's first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group import resolve
from ..comm.workspace import Workspace
from ..errors import FaA2AError
from ..ops import fused, serial
from ..ops.functional import HeadShards
from ..ops.kernels import Qkv, Sink
from ..ops.plan import Plan
from . import progress, record, stalls, sweep
from .pace_options import ORDERS, Config, build_of
from .timing import Method, calls_per_round, interleaved, meet, paired, rounded

STOCK = "stock"
_ADVANCE_PUBLISH_WAIT = 7  # flags of the signal kernel: each call of a measurement is an epoch of its own
_DEADLINE_S = 30.0
Calls = dict[str, Callable[[], None]]


def body(device: torch.device, cases: list[sweep.Case], chosen: list[Config], stamps: bool, out: Path) -> None:
    """What each rank runs. Rank 0 shows the progress and writes the lines."""

    def title(case: sweep.Case) -> str:
        return f"S={case.seq_len} H={case.num_heads}"

    def shown(lines: list[dict[str, Any]]) -> list[str]:
        first = lines[0]
        head = f"\nS {first['seq_len']}, H {first['num_heads']}, us (cost over local stores, 95 %):"
        return [head, *map(_row, lines)]

    main = dist.get_rank() == 0
    progress.run(cases, title, lambda case, tick: measure(case, chosen, stamps, device, tick), shown, out, main=main)


def measure(
    case: sweep.Case, chosen: list[Config], stamps: bool, device: torch.device, tick: Callable[[], object]
) -> list[dict[str, Any]]:
    """One line for the stock kernel and one for each configuration."""
    group = resolve(None)
    q, k, v = serial.scatter(*sweep.inputs(case, group, device), group)
    shards = HeadShards.from_tensors(q, k, v, kernel="fa4", exchange="fused")
    plan, workspace = shards._plan, group.workspace
    assert workspace is not None
    barrier = partial(meet, workspace.memory, workspace.signals)
    bench = _Bench(plan, workspace, (shards._q, shards._k, shards._v), device, barrier)
    calls = {STOCK: bench.stock()} | {config.name: bench.persistent(config) for config in chosen}
    dist.barrier()  # compiling took the ranks apart, and a wait inside a kernel has its deadline
    for name, made in calls.items():
        bench.check(name, made)
    methods = {"fa_only": Method(lambda: bench.alone(q, k, v))}
    for name, made in calls.items():
        methods |= {f"{name}: {what}": Method(call, barrier) for what, call in made.items()}
    count = calls_per_round(calls[STOCK]["local"], device)
    times = interleaved(methods, rounds=case.rounds, calls=count, device=device, align=barrier, tick=tick)
    shape = {name: value for name, value in asdict(case).items() if name not in ("kernel", "profile")}
    common = {**record.environment("pace", device, group.size), **shape, "kernel": "fa4", "calls_per_round": count}
    common["tile"] = "{}x{}".format(*bench.tile)
    lines = [_line(common, Config(STOCK, "first", 0), STOCK, times)]
    for config in chosen:
        line = _line(common, config, config.name, times)
        if stamps:
            line |= bench.stalls(config)
        lines.append(line)
    return lines


class _Bench:
    """The calls of one shape, over the workspace's views and over the same views of local memory."""

    def __init__(
        self, plan: Plan, workspace: Workspace, qkv: Qkv, device: torch.device, barrier: Callable[[], object]
    ) -> None:
        from fa4_a2a.forward import load_forward

        self.plan, self.workspace, self.qkv, self.device, self.barrier = plan, workspace, qkv, device, barrier
        dtype = plan.request.torch_dtype
        self.peers = fused.peer_sink(workspace, plan.shape, dtype)
        self.here = fused.local_sink(plan.shape, dtype, device)
        self.out = workspace.output(workspace.group.rank, plan.shape, dtype)
        self.want: torch.Tensor | None = None
        properties = torch.cuda.get_device_properties(device)
        arch, sms = f"sm_{properties.major}{properties.minor}a", properties.multi_processor_count
        self.target = (plan.shape.head_dim, plan.request.dtype, arch, sms)
        adapter: Any = plan.adapter
        chosen = adapter.tile(plan.shape.local_seq, plan.shape.num_ranks * plan.shape.local_heads)
        self.tile = (chosen.rows, chosen.keys)  # what a call takes
        self.forward = load_forward(*self.target, tile=self.tile)  # the stock kernel

    def stock(self) -> Calls:
        sender, local = (self.repeated(self.arguments(sink), self.forward) for sink in (self.peers, self.here))
        return {"local": local, "sender": sender, "ready_small": self.followed(sender)}

    def alone(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.forward(q, k, v, torch.empty_like(q), None, self.plan.request.scale)

    def persistent(self, config: Config) -> Calls:
        build = build_of(config.variant)
        kernel = self.load(build)
        sender = self.launcher(kernel, config, self.peers)
        calls = {"local": self.launcher(kernel, config, self.here), "sender": sender}
        calls["ready_small"] = self.followed(sender)
        if build.store != "consumer":
            publishing = self.load(build._replace(release=True))
            calls["ready_inside"] = self.launcher(publishing, config, self.peers, publish=True)
        return calls

    def followed(self, call: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            call()
            self.barrier()

        return both

    def load(self, build: Any) -> Any:
        from fa4_a2a.persistent import load_persistent

        return load_persistent(*self.target, self.tile, build=build)

    def arguments(self, sink: Sink) -> list[tuple[Any, ...]]:
        """(q, k, v, o, lse, scale) of each launch of a call."""
        q, k, v = self.qkv
        chunks = q.view(q.shape[0], len(sink.o), -1, *q.shape[2:])
        return [
            (
                chunks[b, run.start : run.start + run.length],
                *(t[b].expand(run.length, -1, -1, -1) for t in (k, v)),
                o[b],
                None,
                self.plan.request.scale,
            )
            for run, o, _ in sink.by_run
            for b in range(q.shape[0])
        ]

    def launcher(
        self, kernel: Any, config: Config, sink: Sink, publish: bool = False, stamps: torch.Tensor | None = None
    ) -> Callable[[], None]:
        launches = [(*arguments, config.pace_ns) for arguments in self.arguments(sink)]
        if publish:  # the call's last launch does
            flags = [0] * (len(launches) - 1) + [_ADVANCE_PUBLISH_WAIT]
            release = self.workspace.memory.release(self.workspace.signals, _DEADLINE_S)
            launches = [(*arguments, release._replace(flags=f)) for arguments, f in zip(launches, flags, strict=True)]
        return self.repeated(launches, partial(kernel, order=ORDERS.index(config.order), stamps=stamps))

    def repeated(self, launches: list[tuple[Any, ...]], kernel: Callable[..., None]) -> Callable[[], None]:
        def call() -> None:
            for arguments in launches:
                kernel(*arguments)

        return call

    def check(self, name: str, calls: Calls) -> None:
        """FaA2AError on every rank if an output differs from the first one checked; outputs are poisoned before."""
        for what in ("sender", "ready_inside"):
            if what not in calls:
                continue
            self.out.fill_(float("nan"))
            self.barrier()
            calls[what]()
            if what == "sender":
                self.barrier()
            got = self.out.clone()
            self.want = got if self.want is None else self.want
            bad = torch.tensor([int(not torch.equal(got, self.want) or bool(got.isnan().any()))], device=self.device)
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if bad.item():
                raise FaA2AError(f"{name}, {what}: output differs from the stock kernel's; a bug, no time is reported")

    def stalls(self, config: Config) -> dict[str, Any]:
        """How long the epilogue waited for the staging, by the tile's number in its CTA; local and remote."""
        kernel = self.load(build_of(config.variant)._replace(stamps=True))
        shape, found = self.plan.shape, {}
        words = kernel.stamp_words(shape.num_ranks, shape.local_seq, shape.local_heads)
        if shape.batch > 1 or len(self.peers.by_run) > 1:
            return {}
        for where, sink in (("local", self.here), ("remote", self.peers)):
            stamps = torch.zeros(words, dtype=torch.int64, device=self.device)
            call = self.launcher(kernel, config, sink, stamps=stamps)
            for _ in range(3):  # the last one's times stay
                self.barrier()
                call()
            self.barrier()
            found[f"stalls_{where}"] = stalls.summary(stamps.cpu())
        return found


def _line(common: dict[str, Any], config: Config, name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    mine = {key.removeprefix(f"{name}: "): values for key, values in times.items() if key.startswith(f"{name}: ")}
    over, over_ci = paired(mine["local"], times["fa_only"])
    line = {**common, **asdict(config), "fa_only_us": round(statistics.median(times["fa_only"]), 2)}
    line |= {"over_fa_us": round(over, 2), "over_fa_ci_us": _rounded(over_ci)}
    for what, values in mine.items():
        line[f"{what}_us"] = round(statistics.median(values), 2)
        if what != "local":
            cost, ci = paired(values, mine["local"])
            line |= {f"cost_{what}_us": round(cost, 2), f"cost_{what}_ci_us": _rounded(ci)}
    return line | {"bitwise_equal": True, "rounds_us": rounded(mine)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _interval(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _row(line: dict[str, Any]) -> str:
    text = f"{line['variant']:22} {line['order']:8} {line['pace_ns']:5}  local {line['local_us']:9.1f}"
    text += f" (fa {line['over_fa_us']:+6.1f} ±{_interval(line['over_fa_ci_us'])})"
    for what in ("sender", "ready_small", "ready_inside"):
        if f"{what}_us" in line:
            text += f"  {what} {line[f'cost_{what}_us']:+6.1f} ±{_interval(line[f'cost_{what}_ci_us'])}"
    for where in ("local", "remote"):
        if f"stalls_{where}" in line:
            text += f"\n    stall {where}: " + stalls.text(line[f"stalls_{where}"])
    return text
