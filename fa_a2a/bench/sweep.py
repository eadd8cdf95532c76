"""The sequence-length sweep: what the exchange after attention costs, serial and fused, beside attention alone.

Methods, all over head-sharded inputs (B, S, h, D), us per call, median over rounds of the maximum over ranks:
  fa_only        the kernel on plain tensors, the better of its default tile and others we would use
  serial         that kernel, an all-to-all, one permute
  serial_graph   the same as a CUDA graph, on GPUs: in front of short attention the host shows in serial. Left out, with
                 the reason in serial_graph_note, where it cannot be captured
  fused_sender   the kernel storing into its peers; waiting only after the last call of a round
  fused_ready    the same, and each call waits until every peer's tiles are here
  fused_local    the same kernel and views with every store local
  fused_op       attention_gather as a user calls it: opens the call, fused_ready, host work included
Speed-ups are over the faster of the two serial ones. E_res = fused - fa_only (the paper's); cost = fused - fused_local,
paired round by round.
equal_clock, on GPUs: the same difference if the SMs' clock had been the other method's (bench/clock.py). A GPU at its
power limit lowers its clock where a kernel draws more, and a long kernel's time is then not the exchange's alone. Of
ready times it is a bound from above, since ranks wait for whichever is slower at the moment.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group import Group, resolve
from ..errors import FaA2AError
from ..nn import UlyssesAttention
from ..ops import fused, serial
from ..ops.functional import HeadShards, attention_gather
from ..ops.kernels import Qkv
from ..ops.plan import Plan
from ..xstage import hidden_fraction, speedup
from . import draws
from .alone import candidates
from .clock import at_clock_of
from .graphs import agree, capture_everywhere
from .record import environment
from .timing import Method, Times, calls_per_round, interleaved, meet, paired, rounded


@dataclass(frozen=True)
class Case:
    """One row of the sweep; shapes of the whole sequence and all heads."""

    seq_len: int
    num_heads: int
    head_dim: int
    batch: int
    dtype: str
    kernel: str
    rounds: int
    profile: str | None = None
    """Of the prediction: name or file; None: the one shipped for this device and number of ranks."""


def inputs(case: Case, group: Group, device: torch.device) -> Qkv:
    """Random q, k, v (B, s, H, D) of this rank."""
    shape = (case.batch, case.seq_len // group.size, case.num_heads, case.head_dim)
    return draws.qkv(shape, getattr(torch, case.dtype), device, seed=1 + group.rank)


def measure(case: Case, device: torch.device, tick: Callable[[], object], prediction: dict[str, Any]) -> dict[str, Any]:
    """The case's JSON line. Correctness first: a fused result that differs from serial by a bit ends the sweep.

    prediction: the fields that were written down before (forecast.predict)."""
    group = resolve(None)
    q, k, v = inputs(case, group, device)
    equal = _bitwise_equal(case, q, k, v)
    q, k, v = serial.scatter(q, k, v, group)
    shards = HeadShards.from_tensors(q, k, v, kernel=case.kernel, exchange="fused")
    plan, workspace = shards._plan, group.workspace
    assert workspace is not None
    sink, local = fused.peer_sink(workspace, plan.shape, q.dtype), fused.local_sink(plan.shape, q.dtype, device)
    memory, signals, scale = workspace.memory, workspace.signals, plan.request.scale
    barrier = partial(meet, memory, signals)
    rotated = (shards._q, shards._k, shards._v)
    # Each call of a measurement is one of its own, so a kernel that ends calls itself counts them, too.
    silent, counting = None, None
    if plan.adapter.can_release:
        silent = memory.release(signals, 30.0, silent=True)
        counting = memory.release(signals, 30.0, advance=True)
    to_peers = fused.launcher(plan, rotated, sink, silent)
    to_local = fused.launcher(plan, rotated, local, silent)
    to_peers_and_end = fused.launcher(plan, rotated, sink, counting)

    def ready() -> None:
        to_peers_and_end()
        if not plan.adapter.can_release:
            barrier()

    methods = {
        "fused_sender": Method(to_peers, barrier),
        "fused_local": Method(to_local),
        "fused_ready": Method(ready),
        "serial": Method(lambda: serial.attend(q, k, v, plan, group)),
        "fused_op": Method(lambda: attention_gather(shards)),
    }
    notes = {}
    if device.type == "cuda":
        replay, reason = _replayed(lambda: serial.attend(q, k, v, plan, group)[0], group)
        if replay is None:
            notes["serial_graph_note"] = reason
        else:
            methods["serial_graph"] = Method(replay)
    for name, adapter in candidates("fa_only", plan.adapter, q.shape).items():
        methods[name] = Method(lambda adapter=adapter: adapter.local(q, k, v, scale, 1, False))  # type: ignore[misc]
    calls = calls_per_round(methods["fused_local"].call, device)
    mhz: Times = {}
    times = interleaved(methods, rounds=case.rounds, calls=calls, device=device, align=barrier, tick=tick, clocks=mhz)
    line = _line(case, device, group, plan, times, equal, calls)
    return line | notes | (differences_at_equal_clocks(times, mhz) if mhz else {}) | prediction


def _replayed(call: Callable[[], torch.Tensor], group: Group) -> tuple[Callable[[], object] | None, str]:
    """Replays of the call as a graph; None, and the first rank's reason, where one cannot capture it. Collective."""
    call()
    captured, reason = capture_everywhere(call, 1, "capture of serial attention", partial(agree, group))
    return (None, reason) if captured is None else (captured[0].replay, "")


def _bitwise_equal(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whole layer, fused against serial with the same kernel, outputs poisoned; the verdict is every rank's."""
    group = resolve(None)
    with torch.no_grad():
        want = UlyssesAttention(kernel=case.kernel, exchange="collective", copy=True)(q, k, v)
        layer = UlyssesAttention(kernel=case.kernel, exchange="fused")
        layer(q, k, v).fill_(float("nan"))
        got = layer(q, k, v)
    bad = int(not torch.equal(got, want))
    verdict = torch.tensor([bad], device=q.device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    if verdict.item():
        differing = int((got != want).sum())
        raise FaA2AError(
            f"fused and serial attention differ at S={case.seq_len}, H={case.num_heads}, P={group.size} "
            f"({differing} of {want.numel()} elements on rank {group.rank}): a bug; no time is reported"
        )
    return True


def _us(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _line(
    case: Case,
    device: torch.device,
    group: Group,
    plan: Plan,
    times: Times,
    equal: bool,
    calls: int,
) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in times.items()}
    serial_us, alone_us = min(median["serial"], median.get("serial_graph", math.inf)), median[_best_alone(times)]
    try:
        hidden = round(hidden_fraction(serial_us=serial_us, fused_us=median["fused_sender"], attention_us=alone_us), 3)
    except FaA2AError:
        hidden = None
    fields = asdict(case)
    fields |= {"kernel": plan.kernel, "exchange": plan.exchange, "local_heads": plan.shape.local_heads}
    return {
        **environment("sweep", device, group.size, plan.kernel),
        **fields,
        "serial_us": _us(median["serial"]),
        **({"serial_graph_us": _us(median["serial_graph"])} if "serial_graph" in median else {}),
        "fused_op_us": _us(median["fused_op"]),
        **differences(times),
        "speedup_sender": round(speedup(serial_us=serial_us, fused_us=median["fused_sender"]), 4),
        "speedup_ready": round(speedup(serial_us=serial_us, fused_us=median["fused_ready"]), 4),
        "hidden_fraction": hidden,
        "bitwise_equal": equal,
        "calls_per_round": calls,
        "rounds_us": rounded(times),
    }


def _best_alone(times: Times) -> str:
    return min((name for name in times if name.startswith("fa_only")), key=lambda name: statistics.median(times[name]))


def differences(times: Times) -> dict[str, Any]:
    """What attention alone and the fused forms take, E_res, and costs with half of their 95 % intervals, in us."""
    median = {name: statistics.median(values) for name, values in times.items()}
    alone = _best_alone(times)
    fields: dict[str, Any] = {
        "fa_only_tile": alone.removeprefix("fa_only_") if alone != "fa_only" else "default",
        "fa_only_us": _us(median[alone]),
    }
    fields |= {f"{name}_us": _us(median[name]) for name in ("fused_sender", "fused_ready", "fused_local")}
    for which in ("sender", "ready"):
        cost, ci = paired(times[f"fused_{which}"], times["fused_local"])
        fields |= {
            f"e_res_{which}_us": _us(median[f"fused_{which}"] - median[alone]),
            f"cost_{which}_us": _us(cost),
            f"cost_{which}_ci_us": _us(ci),
        }
    return fields


def differences_at_equal_clocks(times: Times, mhz: Times) -> dict[str, Any]:
    """Costs at fused_local's clock, E_res at fa_only's; and each method's clock, of the slowest rank."""
    fields: dict[str, Any] = {}
    alone = _best_alone(times)
    for which in ("sender", "ready"):
        fused_us, fused_mhz = times[f"fused_{which}"], mhz[f"fused_{which}"]
        cost, ci = paired(at_clock_of(fused_us, fused_mhz, mhz["fused_local"]), times["fused_local"])
        as_alone = statistics.median(at_clock_of(fused_us, fused_mhz, mhz[alone]))
        fields |= {
            f"cost_{which}_equal_clock_us": _us(cost),
            f"cost_{which}_equal_clock_ci_us": _us(ci),
            f"e_res_{which}_equal_clock_us": _us(as_alone - statistics.median(times[alone])),
        }
    fields["sm_mhz"] = {name: round(statistics.median(values), 1) for name, values in mhz.items()}
    fields["rounds_mhz"] = rounded(mhz, 1)
    return fields
