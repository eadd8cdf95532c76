"""`fa-a2a soak`: very many calls with changing shapes, every output compared bitwise, memory and time watched.

With delays each rank pauses at random before, between and after its kernels, so that the ranks meet in every order that
the protocol allows. With traffic NCCL all-reduces and copies to a peer run beside the calls on streams of their own.
"""

from __future__ import annotations

import os
import random
import sys
import time
from array import array
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from ..comm.group import resolve
from ..errors import FaA2AError
from ..layout import EPOCH_WORD, signed_difference
from ..nn import UlyssesAttention
from ..ops.functional import attention_gather, scatter_heads
from .record import append, environment
from .soak_traffic import Traffic

SETS = 3  # inputs of each shape; two calls of a shape in a row have different ones, so that a stale tile shows
_WARM = 0.1  # part of the calls before memory and time are looked at
_TOLD_EVERY = 500  # calls between two looks at the device, which keep the queue short


class Shape(NamedTuple):
    batch: int
    rows: int  # of a rank
    local_heads: int
    head_dim: int


_CPU_SHAPES = [Shape(1, r, h, d) for r, h, d in ((1, 1, 8), (3, 2, 16), (16, 1, 32), (65, 1, 8), (32, 3, 24))]
_GPU_SHAPES = [Shape(1, r, h, d) for r, h, d in ((1, 1, 128), (100, 3, 64), (333, 2, 128), (1152, 6, 128))]
SHAPES = {"cpu": [*_CPU_SHAPES, Shape(2, 7, 1, 40)], "cuda": [*_GPU_SHAPES, Shape(3, 192, 2, 64)]}


class Case:
    """One shape: its sets of inputs on this rank, and what the serial path makes of each."""

    def __init__(self, shape: Shape, kernel: str, device: torch.device, seed: int) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        generator = torch.Generator(device).manual_seed(seed * 1000 + rank)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        whole = (shape.batch, shape.rows, shape.local_heads * ranks, shape.head_dim)
        self.inputs = [
            [torch.randn(whole, device=device, generator=generator).to(dtype) for _ in range(3)] for _ in range(SETS)
        ]
        serial = UlyssesAttention(kernel=kernel, exchange="collective", copy=True)
        self.wants = [serial(*qkv, return_lse=True) for qkv in self.inputs]
        self.last = 0

    def next_set(self, chance: random.Random) -> int:
        self.last = (self.last + chance.randrange(1, SETS)) % SETS
        return self.last


class Pause:
    """Random delays of this rank, on its device where it has one."""

    def __init__(self, device: torch.device, longest_us: float) -> None:
        self.gpu, self.longest_us = device.type == "cuda", longest_us
        self.chance = random.Random(dist.get_rank())

    def __call__(self) -> None:
        if not self.longest_us or self.chance.random() < 0.5:
            return
        pause_us = self.chance.random() * self.longest_us
        if self.gpu:
            torch.cuda._sleep(int(pause_us * 1700))  # type: ignore[no-untyped-call]  # cycles, at about 1.7 GHz
        else:
            time.sleep(pause_us * 1e-6)


class Held(NamedTuple):
    """What this rank holds, in bytes."""

    resident: int
    symmetric: int
    device: int


def held(device: torch.device) -> Held:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    group = resolve(None)
    symmetric = 0 if group.workspace is None else group.workspace.allocated_bytes
    return Held(resident, symmetric, torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)


def body(device: torch.device, calls: int, longest_us: float, with_traffic: bool, out: Path) -> None:
    """What each rank runs; rank 0 appends the line. Raises FaA2AError if an output was wrong on any rank."""
    kernel = "fa4" if device.type == "cuda" else "cpu"
    cases = [Case(shape, kernel, device, seed) for seed, shape in enumerate(SHAPES[device.type])]
    traffic = Traffic(device) if with_traffic else None
    found = _calls(cases, kernel, device, calls, Pause(device, longest_us), traffic)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    line = {
        **environment("soak", device, dist.get_world_size()),
        **{"calls": calls, "longest_delay_us": longest_us, "traffic": with_traffic, "shapes": len(cases)},
        **{name: max(rank[name] for rank in everyone) for name in found},
    }
    if dist.get_rank() == 0:
        append(out, [line])
        print(report(line), flush=True)
    if line["wrong"] or line["wrong_traffic"] or line["epochs"] != calls:
        raise FaA2AError(f"soak: {report(line)}; outputs must be bitwise those of the serial path")


def _calls(
    cases: list[Case], kernel: str, device: torch.device, calls: int, pause: Pause, traffic: Traffic | None
) -> dict[str, Any]:
    common = random.Random(7)  # the same on every rank: which shape, which set, which way to call
    layers = [UlyssesAttention(kernel=kernel, exchange="fused", copy=copy) for copy in (False, True)]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for case in cases:  # the workspace grows to its size, and every configuration is agreed on
        for with_lse in (False, True):
            layers[0](*case.inputs[0], return_lse=with_lse)
    first = _epoch()
    times, before = array("d", bytes(8 * calls)), held(device)
    began = time.monotonic()
    with tqdm(total=calls, disable=dist.get_rank() != 0, leave=False, unit="call", file=sys.stderr) as bar:
        for number in range(calls):
            at = time.perf_counter()
            case = common.choice(cases)
            index, way, with_lse = case.next_set(common), common.randrange(3), common.random() < 0.5
            pause()
            if traffic is not None:
                traffic.start(number)
            if way < 2:
                result = layers[way](*case.inputs[index], return_lse=with_lse)
                result = result if with_lse else (result, None)
            else:
                shards = scatter_heads(*case.inputs[index], kernel=kernel, exchange="fused", return_lse=with_lse)
                pause()
                result = attention_gather(shards)
            for got, want in zip(result, case.wants[index]):
                if got is not None:
                    wrong += (got != want).any()
            pause()
            times[number] = time.perf_counter() - at
            if number % _TOLD_EVERY == 0:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                bar.update(min(_TOLD_EVERY, calls - number))
            if number == int(calls * _WARM):
                before = held(device)
    seconds, after = time.monotonic() - began, held(device)
    tenth = max(1, calls // 10)
    return {
        "wrong": int(wrong),
        "wrong_traffic": 0 if traffic is None else traffic.wrong(),
        "epochs": signed_difference(_epoch(), first),
        "seconds": round(seconds, 1),
        "call_us_early": round(1e6 * median(times[tenth : 2 * tenth]), 1),
        "call_us_late": round(1e6 * median(times[-tenth:]), 1),
        **{f"{name}_bytes_start": value for name, value in before._asdict().items()},
        **{f"{name}_bytes_end": value for name, value in after._asdict().items()},
    }


def _epoch() -> int:
    workspace = resolve(None).workspace
    assert workspace is not None
    return workspace.memory.words(workspace.signals)[EPOCH_WORD]


def report(line: dict[str, Any]) -> str:
    grown = (line["resident_bytes_end"] - line["resident_bytes_start"]) / 2**20
    return (
        f"{line['calls']} calls on {line['world_size']} ranks ({line['device']}), delays up to "
        f"{line['longest_delay_us']:g} us, {line['shapes']} shapes: {line['wrong']} wrong outputs, "
        f"{line['wrong_traffic']} wrong transfers beside them; {line['seconds']:g} s, a call {line['call_us_early']:g} "
        f"us early and {line['call_us_late']:g} us late, resident memory {grown:+.1f} MiB"
    )
