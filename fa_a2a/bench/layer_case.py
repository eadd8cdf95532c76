"""One case of `fa-a2a sweep --layer` on one rank: inputs, reference output, and what every method is measured with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm.group import Group
from ..errors import FaA2AError
from ..nn import UlyssesAttention
from . import graphs
from .sweep import Case, inputs
from .timing import meet

Call = Callable[[], torch.Tensor]

_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # of the largest output; another kernel's


@dataclass(frozen=True)
class Way:
    """One way through the layer. held_bytes: buffers that it keeps between calls; exact: bitwise equal to `want`, by
    default to nccl."""

    call: Call
    kernel: str
    transport: str
    held_bytes: int = 0
    exact: bool = True
    want: torch.Tensor | None = None


class Layer:
    """q, k, v of one case on this rank, and the reference output. Made by all ranks together."""

    def __init__(self, case: Case, group: Group, device: torch.device) -> None:
        self.case, self.group, self.device = case, group, device
        self.q, self.k, self.v = inputs(case, group, device)
        reference = UlyssesAttention(kernel=case.kernel, exchange="collective", copy=True)
        want = reference(self.q, self.k, self.v)
        assert isinstance(want, torch.Tensor) and reference.last_plan is not None
        self.want, self.plan = want, reference.last_plan
        self.transport: str = dist.get_backend(group.handle) if device.type == "cpu" else "nccl"

    def agree(self, topic: str, reason: str) -> str:
        """Why one rank or another cannot take part, the first reason; "" where all can. Collective."""
        return graphs.agree(self.group, topic, reason)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.plan.adapter.local(q, k, v, self.plan.request.scale, self.group.size, False)[0]

    def align(self) -> None:
        """Makes the ranks' streams go on together."""
        workspace = self.group.workspace
        assert workspace is not None
        meet(workspace.memory, workspace.signals)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(self, name: str, call: Call, way: Way) -> None:
        """One call on a poisoned output against the reference; raises on every rank where one rank's differs."""
        call().fill_(float("nan"))
        got = call()
        want = self.want if way.want is None else way.want
        good = torch.equal(got, want) if way.exact else self.close_to_reference(got)
        bad = torch.tensor([int(not good)], device=self.device)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            raise FaA2AError(
                f"method {name} at S={self.case.seq_len}, H={self.case.num_heads}, P={self.group.size} differs from "
                "the layer of separate collectives: a bug; no time is reported"
            )

    def close_to_reference(self, got: torch.Tensor) -> bool:
        difference = (got.float() - self.want.float()).abs().max()  # NaN where there is one, and then not close
        return got.shape == self.want.shape and bool(
            difference <= _TOLERANCE[got.dtype] * self.want.float().abs().max()
        )

    def slowest_us(self, call: Callable[[], object], calls: int = 1) -> float:
        """Time of a call on the host's clock, waiting for its end; the slowest rank's. Collective."""
        call()
        self.wait()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        self.wait()
        us = torch.tensor([(time.perf_counter() - begin) * 1e6 / calls], dtype=torch.float64, device=self.device)
        dist.all_reduce(us, op=dist.ReduceOp.MAX)
        return us.item()
