"""The litmus tests of the protocol: do its fences and kernel boundaries order what they are said to? Two GPUs.

Each variant writes a new value into the peer's memory round after round and then a flag; the peer counts words that
still hold the old value once it has acquired the flag. What is claimed is only as strong as the controls: programs
without the fence that must be able to fail. Every outcome is recorded, failing controls or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..comm.group import Group, resolve
from ..comm.nvshmem import Nvshmem
from ..comm.symmetric import SymmetricBlock
from ..errors import FaA2AError
from ..layout import READY_WORD, SIGNAL_BYTES, Word
from .record import append, environment

_DEADLINE_S = 20.0
_BOUNDARY_ROUNDS = 2000  # two launches or more each, from the host
_CONTROLS = ("control", "st_control", "bulk_read_control")


def body(device: torch.device, rounds: int, out: Path) -> None:
    """Runs every variant on two ranks; rank 0 appends the lines. Raises FaA2AError if a fenced variant is unsound."""
    from fa4_a2a.litmus import VARIANTS, Counter

    group = resolve(None)
    memory = Nvshmem(group, device, 30.0)
    lines = []
    for variant in VARIANTS:
        counters = _run(variant, memory, group, device, rounds)
        found = {field.name.lower(): counters[field] for field in Counter if field is not Counter.ARRIVALS}
        lines.append({**environment("litmus", device, 2), "variant": variant, **found})
    if group.rank == 0:
        append(out, lines)
        for line in lines:
            print(
                f"{line['variant']:12} rounds {line['rounds']:7}  stale words {line['stale']:9}  in blocks "
                f"{line['stale_blocks']:7}  wrong {line['wrong']}  deadline missed {line['error']}",
                flush=True,
            )
    broken = [x["variant"] for x in lines if x["error"] or x["wrong"] or (x["variant"] not in _CONTROLS and x["stale"])]
    if broken:
        raise FaA2AError(f"litmus test: {', '.join(broken)} gave stale or wrong data; the protocol is not safe here")


def _run(variant: str, memory: Nvshmem, group: Group, device: torch.device, rounds: int) -> list[int]:
    """The reader's counters, known to both ranks, with the writer's error beside the reader's."""
    from fa4_a2a.litmus import DATA_BYTES, Counter, load_litmus

    litmus = load_litmus("sm_{}{}a".format(*torch.cuda.get_device_capability(device)), variant)
    data, words = memory.allocate(DATA_BYTES, 30.0), memory.allocate(SIGNAL_BYTES, 30.0)
    counters = torch.zeros(len(Counter), dtype=torch.int64, device=device)
    deadline_ns = int(_DEADLINE_S * 1e9)
    torch.cuda.synchronize()
    dist.barrier()
    if variant in ("boundary", "call"):
        drive = _drive_boundary if variant == "boundary" else _drive_call
        drive(_Pair(litmus, memory, group.rank, data, words, counters, deadline_ns))
    elif group.rank == 0:
        litmus.write(data.addresses[1], words.addresses[1], words.addresses[0], counters, rounds, deadline_ns)
    else:
        litmus.read(data.addresses[1], words.addresses[1], words.addresses[0], counters, rounds, deadline_ns)
    torch.cuda.synchronize()
    mine: list[int] = counters.tolist()
    both: list[Any] = [None, None]
    dist.all_gather_object(both, mine)
    both[1][Counter.ERROR] |= both[0][Counter.ERROR]
    memory.free(words, 30.0)
    memory.free(data, 30.0)
    return list(both[1])


class _Pair(NamedTuple):
    """A writer, rank 0, and a reader, rank 1, whose steps are launched from the host."""

    litmus: Any
    memory: Nvshmem
    rank: int
    data: SymmetricBlock
    signals: SymmetricBlock
    counters: torch.Tensor
    deadline_ns: int


def _drive_boundary(pair: _Pair) -> None:
    """A kernel of bulk stores, its end, then the signal kernel: how a stock attention kernel is followed."""
    ready = pair.signals.addresses[1] + 8 * READY_WORD
    for n in range(1, _BOUNDARY_ROUNDS + 1):
        if pair.rank == 0:
            pair.litmus.write(pair.data.addresses[1], n, pair.counters)
        else:
            pair.litmus.read(pair.data.addresses[1], ready, n, n, pair.counters, pair.deadline_ns)
        pair.memory.signal(pair.signals, Word.READY, advance=True, publish=True, wait=True, timeout_s=_DEADLINE_S)


def _drive_call(pair: _Pair) -> None:
    """The steps of a call: q, k, v stored and announced, waited for by one kernel and read by the next, the end of the
    reading announced."""
    for n in range(1, _BOUNDARY_ROUNDS + 1):
        if pair.rank == 0:
            pair.litmus.write(pair.data.addresses[1], n, pair.counters)
        pair.memory.signal(pair.signals, Word.ARRIVED, advance=True, publish=True, wait=True, timeout_s=_DEADLINE_S)
        if pair.rank == 1:
            pair.litmus.read(pair.data.addresses[1], 0, n, n, pair.counters, pair.deadline_ns)
        pair.memory.signal(pair.signals, Word.READY, publish=True, wait=True, timeout_s=_DEADLINE_S)
