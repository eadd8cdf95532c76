"""The methods that `fa-a2a exchange` times on one shape, on one rank; what they are stands in exchange.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from einops import rearrange

from ..comm import collectives
from ..comm.group import Group
from ..comm.nvshmem import Nvshmem
from ..comm.symmetric import SymmetricBlock
from ..errors import ConfigurationError, FaA2AError
from ..layout import ExchangeShape, Word, aligned, chunk_owners
from . import draws
from .timing import meet

BASELINES = ("copies", "nccl", "nccl_packed")
TIMEOUT_S = 30.0
_KERNEL_OPTIONS = ("threads", "unroll", "stages", "stage_bytes")
_OPTIONS = (*_KERNEL_OPTIONS, "ctas", "own_last", "rope")

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One shape, of the whole sequence and all heads, and the methods to time on it."""

    seq_len: int
    num_heads: int
    head_dim: int
    batch: int
    dtype: str
    rounds: int
    methods: tuple[str, ...]


def parse(method: str) -> tuple[str, dict[str, str]]:
    """Path and options of a method of ours. Raises ConfigurationError for what there is not."""
    path, _, text = method.partition(":")
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    options = {name: value for name, _, value in pairs}
    if path not in ("st", "bulk") or not all(name in _OPTIONS and value for name, value in options.items()):
        raise ConfigurationError(
            f"no method {method!r}; there are {', '.join(BASELINES)}, st and bulk, the last two with options "
            f"({', '.join(_OPTIONS)}) as in st:ctas=16,threads=512"
        )
    for name, value in options.items():
        if name == "rope" and value not in ("interleaved", "halves"):
            raise ConfigurationError(f"rope in {method!r} is interleaved or halves, not {value!r}")
        if name != "rope" and not value.isdecimal():
            raise ConfigurationError(f"{name} in {method!r} must be a whole number, not {value!r}")
    return path, options


class Exchange:
    """q, k, v, the ranks' Q, K and V, and one call for each method. Made and closed by all ranks together."""

    def __init__(
        self, case: Case, device: torch.device, group: Group, memory: Nvshmem, signals: SymmetricBlock
    ) -> None:
        self.case, self.device, self.group, self.memory, self.signals = case, device, group, memory, signals
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.shape = ExchangeShape(
            case.batch, case.seq_len, case.num_heads, case.head_dim, group.size, self.dtype.itemsize
        )
        self.record = torch.zeros(8, dtype=torch.int64, pin_memory=True)  # of our kernel's faults
        local = (case.batch, self.shape.local_seq, case.num_heads, case.head_dim)
        self.qkv = draws.qkv(local, self.dtype, device, seed=1 + group.rank)
        self.owners = chunk_owners(group.rank, memory.positions, memory.world)
        orders = [chunk_owners(r, memory.positions, memory.world) for r in range(group.size)]
        self.chunk_at = [order.index(group.rank) for order in orders]
        self._step = aligned(self.shape.tensor_bytes)
        self.block = memory.allocate(3 * self._step, TIMEOUT_S)
        # Q, K and V of each rank, [3][P]
        self.addresses = [[address + t * self._step for address in self.block.addresses] for t in range(3)]
        self.views = [[self._view(peer, t) for peer in self.block.peers] for t in range(3)]
        self.bytes_out = 3 * self.shape.tensor_bytes * (group.size - 1) // group.size

    def check(self, name: str, call: Call) -> None:
        """Bitwise against three all-to-alls, buffers poisoned; raises on every rank where one differs."""
        mine = [views[self.group.rank] for views in self.views]
        for buffer in mine:
            buffer.fill_(float("nan"))
        torch.cuda.synchronize(self.device)
        dist.barrier()
        result = call()
        torch.cuda.synchronize(self.device)
        dist.barrier()
        want = [collectives.scatter_heads(x, self.group) for x in self.qkv]
        if name in ("nccl", "nccl_packed"):
            got: list[torch.Tensor] = list(result)  # type: ignore[call-overload]
        else:
            got, first = mine, 2 if "rope" in name else 0  # q and k are changed on the way: tests/gpu compares these
            want[0] = torch.cat([want[0].chunk(self.group.size, dim=1)[owner] for owner in self.owners], dim=1)
            got, want = got[first:], want[first:]
        differs = torch.tensor([int(not all(map(torch.equal, got, want)))], device=self.device)
        dist.all_reduce(differs, op=dist.ReduceOp.MAX)
        if differs.item():
            raise FaA2AError(f"exchange {name} at {self.case} gives wrong data: a bug; no time is reported")

    def _view(self, peer: torch.Tensor, t: int) -> torch.Tensor:
        there = (self.case.batch, self.case.seq_len, self.shape.local_heads, self.case.head_dim)
        return peer[t * self._step : t * self._step + self.shape.tensor_bytes].view(self.dtype).view(there)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.memory.free(self.block, TIMEOUT_S)

    def barrier(self) -> None:
        meet(self.memory, self.signals)

    def call(self, name: str) -> Call:
        """One exchange; returns Q, K, V unless they are in the buffers."""
        if name == "nccl":
            return lambda: [collectives.scatter_heads(x, self.group) for x in self.qkv]
        if name == "nccl_packed":
            return self._packed
        if name == "copies":
            copies = list(self._copies())
            return lambda: self._copy(copies)
        return self._ours(*parse(name))

    def _packed(self) -> torch.Tensor:
        size = self.group.size
        send = torch.stack([rearrange(x, "b s (p h) d -> p b s h d", p=size) for x in self.qkv], dim=1)
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self.group.handle)
        return rearrange(received, "p t b s h d -> t b (p s) h d")

    def _copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(to, from) as 16-byte elements, for each tensor and peer."""
        rows, heads = self.shape.local_seq, self.shape.local_heads
        for t, x in enumerate(self.qkv):
            for peer in self.owners:
                at = rows * (self.chunk_at[peer] if t == 0 else self.group.rank)
                to = self.views[t][peer][:, at : at + rows]
                mine = x[:, :, peer * heads : (peer + 1) * heads]
                yield to.view(torch.complex128), mine.view(torch.complex128)

    def _copy(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for to, x in copies:
            to.copy_(x, non_blocking=True)
        self.memory.signal(self.signals, Word.ARRIVED, advance=True, publish=True, wait=True)

    def _ours(self, path: str, options: dict[str, str]) -> Call:
        from fa4_a2a.scatter import NormRope, ScatterPlan, load_scatter

        arch = "sm_{}{}a".format(*torch.cuda.get_device_capability(self.device))
        numbers = {name: int(value) for name, value in options.items() if name != "rope"}
        norm_rope, extras = None, {}
        if "rope" in options:
            norm_rope = NormRope(rope=options["rope"], weight_dtype=self.case.dtype)
            angle = torch.randn(self.shape.local_seq, self.case.head_dim, device=self.device)
            weight = torch.randn(self.case.head_dim, device=self.device).to(self.dtype)
            extras = {"cos": angle.cos(), "sin": angle.sin(), "q_weight": weight, "k_weight": weight}
        kernel_options = {name: numbers[name] for name in _KERNEL_OPTIONS if name in numbers}
        kernel = load_scatter(self.case.head_dim, self.case.dtype, arch, path, norm_rope, **kernel_options)
        blocks = torch.tensor(self.signals.addresses, dtype=torch.int64, device=self.device)
        plan = ScatterPlan(
            kernel,
            tuple(self.qkv[0].shape),
            self.group.rank,
            self.addresses,
            self.chunk_at,
            blocks,
            self.record.data_ptr(),
            numbers.get("ctas") or torch.cuda.get_device_properties(self.device).multi_processor_count,
            own_last=bool(numbers.get("own_last")),
        )
        q, k, v = self.qkv
        return lambda: plan(q, k, v, deadline_ns=int(TIMEOUT_S * 1e9), **extras)
