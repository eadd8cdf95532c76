"""One model on one rank: the single-GPU reference, its parallel twins, and what every method is measured with."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group import Group
from ..errors import FaA2AError
from ..integrations import diffusers as integration
from ..integrations.graph import waited
from .dit_models import Case, make

Call = Callable[[], torch.Tensor]

_KERNELS = {"cuda": ("_native_cudnn", "native"), "cpu": ("native",)}  # diffusers' own, for one GPU and for its Ulysses
_AGREE_S = 300.0
_OF_WRONG = 0.25  # of the difference that a wrong exchange makes: more is not rounding


@dataclass(frozen=True)
class Way:
    """One way through the forward. attention: the kernel in it."""

    model: Any
    call: Call
    attention: str


class Bench:
    """Model, inputs and reference output of one case. Made by all ranks together."""

    def __init__(self, case: Case, group: Group, device: torch.device) -> None:
        self.case, self.group, self.device = case, group, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model, self.inputs = make(case, device, self.dtype)
        self.model: Any = model
        self.parameters = sum(p.numel() for p in model.parameters())
        self.kernel, self.want = self._fastest_single()
        self.wrong_difference = self._difference(self._with_heads_rolled())

    def _fastest_single(self) -> tuple[str, torch.Tensor]:
        """diffusers' kernel that is fastest on one GPU, the same for all ranks, and the output with it."""
        speeds, outs = {}, {}
        for name in _KERNELS[self.device.type]:
            self.model.set_attention_backend(name)
            outs[name] = self.forward(self.model)().clone()
            speeds[name] = self.slowest_ms(self.forward(self.model))
        best = min(speeds, key=speeds.__getitem__)
        self.model.set_attention_backend(best)
        return best, outs[best]

    def _with_heads_rolled(self) -> torch.Tensor:
        """The output where every head of self-attention stands in its neighbour's place: as a wrong exchange may."""
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        functions, name = _AttentionBackendRegistry._backends, AttentionBackendName(self.kernel)
        right = functions[name]

        def rolled(query: torch.Tensor, key: torch.Tensor, **options: Any) -> torch.Tensor:
            out: torch.Tensor = right(query=query, key=key, **options)
            return out.roll(1, dims=2) if query.shape == key.shape else out

        functions[name] = rolled
        try:
            return self.forward(self.model)()
        finally:
            functions[name] = right

    def forward(self, model: Any) -> Call:
        def call() -> torch.Tensor:
            out: torch.Tensor = waited(model(**self.inputs)[0])
            return out

        return call

    def single(self) -> Way:
        return Way(self.model, self.forward(self.model), self.kernel)

    def diffusers(self) -> Way:
        model = self._parallel(self.kernel)
        return Way(model, self.forward(model), self.kernel)

    def ours(self) -> Way:
        integration.enable()
        model = self._parallel(integration.NAME)
        call = self.forward(model)
        call()
        plan = next(reversed(self.group.plans.values()), None)
        if plan is None:
            raise FaA2AError("the model ran without fa_a2a's attention: a bug; no time is reported")
        return Way(model, call, f"{plan.kernel}, {'overlapped' if plan.overlapped else plan.exchange}")

    def _parallel(self, backend: str) -> Any:
        """A twin that shares the weights, on all ranks of the group."""
        from diffusers import ContextParallelConfig

        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        model = copy.deepcopy(self.model, {id(x): x for x in tensors})
        model.set_attention_backend(backend)
        integration.parallelize(model, ContextParallelConfig(ulysses_degree=self.group.size))
        return model

    def check(self, name: str, got: torch.Tensor) -> float:
        """Largest difference to the single GPU's output, over all ranks; raises on every rank where it is too large."""
        worst = self._difference(got)
        if not worst <= (limit := _OF_WRONG * self.wrong_difference):
            raise FaA2AError(
                f"{name} of {self.case.name} on {self.group.size} ranks differs from one GPU by {worst:.3g}, more than "
                f"{limit:.3g}, a quarter of what heads in each other's place do: a bug; no time is reported"
            )
        return worst

    def _difference(self, got: torch.Tensor) -> float:
        difference = (got.float() - self.want.float()).abs().max()
        worst = difference.nan_to_num(nan=float("inf")).double().reshape(1)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst.item())

    def agree(self, topic: str, reason: str) -> str:
        """Why one rank or another cannot take part, the first reason; "" where all can. Collective."""
        return next(filter(None, self.group.exchange(topic, reason, _AGREE_S)), "")

    def slowest_ms(self, call: Callable[[], object], to_its_end: bool = True) -> float:
        """A call's time on the host's clock, to its end or until it is launched; the slowest rank's. Collective."""
        self.wait()
        dist.barrier()
        begin = time.perf_counter()
        call()
        if to_its_end:
            self.wait()
        ms = torch.tensor([(time.perf_counter() - begin) * 1e3], dtype=torch.float64, device=self.device)
        dist.all_reduce(ms, op=dist.ReduceOp.MAX)
        return ms.item()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
