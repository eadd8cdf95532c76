"""What the forms of the fa4 kernel cost on one GPU, every store local: no peer is needed.

For each shape (tokens, heads of one rank, ranks P) one line a form; a form's output has the layout of P owners, but in
this GPU's memory:
  stock          the kernel on plain tensors, the better of its tiles: what all others are compared with
  chunks         the stock kernel, one chunk of queries for each owner
  persistent     the library's kernel: staging of its own, paced slices, own chunk last
  own_first      the same, own chunk first
  unpaced        as persistent, a finished tile leaves at once
  no_store_warp  staging, but a consumer warp stores the whole tile: no warp for stores
Interleaved, in an order of its own each round. over_stock_percent: median over rounds of (form - stock) / stock, with
the half width of the mean's 95 % interval. Correctness first: all forms of one key tile give the same bits.

calls_us: of the persistent form, call by call, what a rank's calls differ by when nobody waits for anybody.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..errors import FaA2AError
from ..layout import ExchangeShape
from ..ops import fused, kernels
from ..ops.kernels import Qkv, Sink
from ..ops.pace import slice_pace_ns
from . import one_gpu, progress, record
from .alone import candidates
from .timing import paired

STOCK = "stock"
LIBRARY = "persistent"
FORMS = (STOCK, "chunks", LIBRARY, "own_first", "unpaced", "no_store_warp")
_SERIES_US = 300_000.0  # of calls timed one by one
_SERIES_CALLS = (10, 200)
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One row. local_heads: of one rank of `num_ranks`, whose attention over all seq_len tokens is timed."""

    seq_len: int
    local_heads: int
    num_ranks: int
    head_dim: int
    dtype: str
    rounds: int


def body(device: torch.device, cases: list[Case], forms: list[str], out: Path) -> None:
    def title(case: Case) -> str:
        return f"S={case.seq_len} h={case.local_heads} P={case.num_ranks}"

    progress.run(cases, title, lambda case, tick: measure(case, forms, device, tick), partial(map, _row), out)


def measure(
    case: Case, forms: list[str], device: torch.device, tick: Callable[[], object] = lambda: None
) -> list[dict[str, Any]]:
    """One line for each form."""
    calls = _Forms(case, one_gpu.draw(case, device), device).chosen(forms)  # the stock kernel's first
    times, count = one_gpu.times(calls, case, device, tick)
    series = _series(calls[LIBRARY], device) if LIBRARY in calls else []
    common = {**record.environment("designs", device, 1), "kernel": "fa4", "batch": 1, **asdict(case)}
    return _lines(common | {"calls_per_round": count}, times, series)


def _lines(common: dict[str, Any], times: dict[str, list[float]], series: list[float]) -> list[dict[str, Any]]:
    tiles = [name for name in times if name.startswith(STOCK)]
    best = min(tiles, key=lambda name: statistics.median(times[name]))
    lines = []
    for name, rounds in times.items():
        if name in tiles and name != best:
            continue
        over, ci = paired([100 * x / y for x, y in zip(rounds, times[best], strict=True)], [100.0] * len(rounds))
        line = {**common, "form": STOCK if name == best else name, "us": round(statistics.median(rounds), 2)}
        if name == best:
            line["tile"] = best.partition(" ")[2] or "default"
        else:
            line |= {"over_stock_percent": round(over, 3), "over_stock_ci": None if ci is None else round(ci, 3)}
        if name == LIBRARY:
            line["calls_us"] = [round(x, 2) for x in series]
        lines.append(line | {"rounds_us": [round(x, 2) for x in rounds]})
    return lines


class _Forms:
    """Calls of one shape by name."""

    def __init__(self, case: Case, qkv: Qkv, device: torch.device) -> None:
        self.case, self.qkv, self.device = case, qkv, device
        dtype = qkv[0].dtype
        self.fa4: Any = kernels.load("fa4", device, dtype, case.head_dim, with_lse=False, fused=False)
        self.scale = case.head_dim**-0.5
        heads = case.local_heads * case.num_ranks
        shape = ExchangeShape(1, case.seq_len, heads, case.head_dim, case.num_ranks, dtype.itemsize)
        self.sink: Sink = fused.local_sink(shape, dtype, device)

    def chosen(self, names: list[str]) -> dict[str, Call]:
        """Checked calls; those of the stock kernel's tiles are "stock" and "stock ROWSxKEYS"."""
        q, k, v = self.qkv
        stock = candidates(STOCK, self.fa4, q.shape, " ")
        found: dict[str, Call] = {n: partial(a.local, q, k, v, self.scale, 1, False) for n, a in stock.items()}
        want = self.fa4.local(q, k, v, self.scale, 1, False)[0]
        for name in names:
            if name != STOCK:
                found[name] = self._form(name)
                self._check(name, found[name], want)
        return found

    def _form(self, name: str) -> Call:
        if name == "chunks":
            (launch,) = self.fa4.launches(*self.qkv, self.scale, self.sink, False, None)
            return launch  # type: ignore[no-any-return]
        from fa4_a2a.persistent import Build, Order, load_persistent

        case, properties = self.case, torch.cuda.get_device_properties(self.device)
        arch, sms = f"sm_{properties.major}{properties.minor}a", properties.multi_processor_count
        build = Build(store="consumer") if name == "no_store_warp" else Build()
        tile = self.fa4.tile(case.seq_len // case.num_ranks, case.num_ranks * case.local_heads)
        kernel = load_persistent(case.head_dim, case.dtype, arch, sms, (tile.rows, tile.keys), build=build)
        order = Order.OWN_FIRST if name == "own_first" else Order.OWN_LAST
        pace = (kernel.tile.rows, case.seq_len, case.head_dim, self.qkv[0].itemsize, sms, build.slice_rows, arch)
        pace_ns = 0 if name in ("unpaced", "no_store_warp") else slice_pace_ns(*pace)
        chunks = self.qkv[0].view(case.num_ranks, -1, *self.qkv[0].shape[2:])
        keys, values = (t.expand(case.num_ranks, -1, -1, -1) for t in self.qkv[1:])
        ((_, o, _),) = self.sink.by_run
        return partial(kernel, chunks, keys, values, o[0], None, self.scale, pace_ns, order=order)

    def _check(self, name: str, call: Call, want: torch.Tensor) -> None:
        """FaA2AError where the output, poisoned before, differs from the stock kernel's of the same key tile."""
        for chunk in self.sink.o:
            chunk.fill_(float("nan"))
        call()
        if not torch.equal(torch.cat(self.sink.o, dim=1), want):
            raise FaA2AError(f"{name}: output differs from the stock kernel's; a bug, no time is reported")


def _series(call: Call, device: torch.device) -> list[float]:
    """us of calls one behind the other, each by itself."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_SERIES_CALLS[1] + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    call()
    events[1].record()
    torch.cuda.synchronize(device)
    one_us = events[0].elapsed_time(events[1]) * 1e3
    count = int(min(_SERIES_CALLS[1], max(_SERIES_CALLS[0], _SERIES_US / one_us)))
    call()
    for event in events[:count]:
        event.record()
        call()
    events[count].record()
    torch.cuda.synchronize(device)
    return [1e3 * a.elapsed_time(b) for a, b in pairwise(events[: count + 1])]


def _row(line: dict[str, Any]) -> str:
    shape = f"S {line['seq_len']:6} h {line['local_heads']:3} P {line['num_ranks']}"
    text = f"{shape}  {line['form']:14} {line['us']:9.1f} us"
    if line["form"] == STOCK:
        return f"{text}  tile {line['tile']}"
    ci = "-" if line["over_stock_ci"] is None else f"{line['over_stock_ci']:.2f}"
    return f"{text}  {line['over_stock_percent']:+6.2f} ± {ci} % of stock"
