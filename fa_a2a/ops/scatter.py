"""The exchange before attention on the fused path: stores into the peers' Q, K and V instead of collectives.

On GPUs one kernel stores every slice, publishes and waits; between CPU processes torch copies do the same in steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ..comm.workspace import Workspace
from ..layout import ExchangeShape
from . import fused
from .kernels import Qkv, loadable
from .norm_rope import KERNEL_HEAD_DIMS, NormRope
from .plan import Plan
from .trace import step

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, "NormRope | None"], None]


class Prepared:
    """What does not change from call to call of one plan on one workspace: where the slices go, and who takes them."""

    def __init__(self, plan: Plan, workspace: Workspace) -> None:
        by = _by_kernel if workspace.memory.device.type == "cuda" else _by_copies
        self.store = by(plan, workspace)


def scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    workspace: Workspace,
    timeout_s: float,
    norm_rope: NormRope | None = None,
) -> Qkv:
    """Stores each head slice of q, k, v (B, s, H, D) into its owner's buffers, and waits for the peers' slices.

    Returns this rank's Q, K, V (B, S, h, D), views of the workspace; Q's rows are in chunk order, so that the attention
    kernel finds each owner's queries where its strides put them. Replicated text does not travel: each rank puts its
    own copy of its heads into its own buffers, into Q once for each chunk.
    """
    workspace.take_turn("scatter")
    try:
        workspace.order_streams()
        prepared = workspace.prepare(Prepared, plan)
        with step("scatter_heads", q.device):
            workspace.poison_output()
            prepared.store(q, k, v, timeout_s, norm_rope)
    except BaseException as error:
        workspace.poison(error)
        raise
    return workspace.prepare(fused.Prepared, plan).qkv


def in_chunk_order(q_BShD: torch.Tensor, shape: ExchangeShape, owners: tuple[int, ...]) -> torch.Tensor:
    """A head-sharded Q, rows in the order of the sequence, as the fused path wants it: chunk by chunk, padded."""
    batch, _, heads, head_dim = q_BShD.shape
    chunks = q_BShD.new_zeros(batch, len(owners), shape.local_seq, heads, head_dim)
    for chunk, owner in enumerate(owners):
        torch.cat(
            [q_BShD[:, at : at + n] for at, n in shape.spans(owner)], 1, out=chunks[:, chunk, : shape.rows(owner)]
        )
    return chunks.flatten(1, 2)


@lru_cache(maxsize=32)
def load(
    device: torch.device, dtype: str, head_dim: int, equal: bool = True, layout: tuple[str, ...] | None = None
) -> Callable[..., None]:
    """The GPU kernel; compiles it, or takes it from the cache, before it returns. layout: of a NormRope that the kernel
    applies; the one for unequal slices applies none."""
    from fa4_a2a.scatter import NormRope as KernelOptions
    from fa4_a2a.scatter import load_scatter
    from fa4_a2a.scatter_unequal import load_unequal

    arch = "sm_{}{}a".format(*torch.cuda.get_device_capability(device))
    if not equal:
        return load_unequal(head_dim, dtype, arch)  # type: ignore[no-any-return]
    inside = None
    if layout is not None and head_dim in KERNEL_HEAD_DIMS:
        weights, kind, entries, tables, _ = layout
        halved = kind != "" and int(entries) < head_dim
        inside = KernelOptions(weights != "", kind, halved, weights or "float32", tables or "float32")
    return load_scatter(head_dim, dtype, arch, norm_rope=inside)  # type: ignore[no-any-return]


def _by_kernel(plan: Plan, workspace: Workspace) -> Store:
    shape = plan.shape
    if not shape.is_equal:
        return _by_unequal_kernel(plan, workspace)
    from fa4_a2a.scatter import ScatterPlan

    ranks = range(workspace.group.size)
    launch = ScatterPlan(
        load(workspace.memory.device, plan.request.dtype, shape.head_dim, True, plan.request.norm_rope),
        (shape.batch, shape.local_seq, shape.num_heads, shape.head_dim),
        workspace.group.rank,
        [[workspace.address(name, rank) for rank in ranks] for name in "qkv"],
        workspace.my_chunk_at,
        *_signals(workspace),
    )

    def store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, timeout_s: float, norm_rope: NormRope | None) -> None:
        extras: dict[str, object] = {}
        if norm_rope is not None:
            for name in ("q_weight", "k_weight", "cos", "sin"):
                table = getattr(norm_rope, name)
                extras[name] = None if table is None else loadable(table)
            extras["eps"] = norm_rope.eps
        deadline_ns = int(timeout_s * 1e9)
        launch(loadable(q), loadable(k), loadable(v), fingerprint=plan.fingerprint, deadline_ns=deadline_ns, **extras)

    return store


def _by_unequal_kernel(plan: Plan, workspace: Workspace) -> Store:
    """Own rows by the kernel that looks each slice up; replicated text by copies before it, which it waits for."""
    from fa4_a2a.scatter_unequal import Slice, UnequalPlan

    shape, rank = plan.shape, workspace.group.rank
    own, text = shape.own_rows(rank), text_slices(plan, workspace)

    def slice_of(name: str, peer: int) -> Slice:
        buffer = workspace.head_sharded(name, peer, shape, plan.request.torch_dtype)
        mine = buffer[:, destination(name, workspace.my_chunk_at[peer], rank, shape)]
        taken = heads(name, peer, shape)
        batch_bytes = buffer.stride(0) * buffer.itemsize
        return Slice(mine.data_ptr(), batch_bytes, taken.start, taken.stop - taken.start)

    launch = UnequalPlan(
        load(workspace.memory.device, plan.request.dtype, shape.head_dim, equal=False),
        (shape.batch, shape.sizes[rank], shape.num_heads, shape.head_dim),
        rank,
        [[slice_of(name, peer) for peer in range(workspace.group.size)] for name in "qkv"],
        *_signals(workspace),
    )

    def store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, timeout_s: float, _: NormRope | None) -> None:
        tensors, deadline_ns = (q, k, v), int(timeout_s * 1e9)
        for index, rows, mine, target in text:
            target.copy_(tensors[index][:, rows, mine])
        sources = [loadable(t[:, own]) for t in tensors]
        launch(*sources, fingerprint=plan.fingerprint, deadline_ns=deadline_ns)

    return store


def _signals(workspace: Workspace) -> tuple[torch.Tensor, int, int]:
    """Every rank's signal block, where a wait that fails is recorded, and how many CTAs take part."""
    from ..comm.nvshmem import Nvshmem

    memory = workspace.memory
    assert isinstance(memory, Nvshmem)
    ctas = torch.cuda.get_device_properties(memory.device).multi_processor_count
    return memory.signal_table(workspace.signals), memory.record_address, ctas


def _by_copies(plan: Plan, workspace: Workspace) -> Store:
    shape, dtype, rank = plan.shape, plan.request.torch_dtype, workspace.group.rank
    own = shape.own_rows(rank)

    def there(name: str, peer: int) -> torch.Tensor:
        rows = destination(name, workspace.my_chunk_at[peer], rank, shape)
        return workspace.head_sharded(name, peer, shape, dtype)[:, rows]

    slices = [
        (i, own, heads(name, peer, shape), there(name, peer))
        for i, name in enumerate("qkv")
        for peer in workspace.owners
    ] + text_slices(plan, workspace)

    def store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, timeout_s: float, _: NormRope | None) -> None:
        tensors = (q, k, v)
        for index, rows, mine, target in slices:
            target.copy_(tensors[index][:, rows, mine])
        workspace.announce(plan.fingerprint, timeout_s)

    return store


def heads(name: str, peer: int, shape: ExchangeShape) -> slice:
    """The heads of q, k or v that `peer` needs."""
    found = (shape.head_ranges if name == "q" else shape.kv_ranges)[peer]
    return slice(found.start, found.stop)


def destination(name: str, chunk: int, rank: int, shape: ExchangeShape) -> slice:
    """Where `rank`'s own rows lie in a peer's buffer, in which they are chunk number `chunk` of Q."""
    in_q = chunk * shape.local_seq + shape.own_rows(rank).start
    first = in_q if name == "q" else shape.shards[rank][0]
    return slice(first, first + shape.sizes[rank])


def text_slices(plan: Plan, workspace: Workspace) -> list[tuple[int, slice, slice, torch.Tensor]]:
    """(tensor, rows, heads, where they go) of replicated text, all in this rank's memory."""
    shape, rank = plan.shape, workspace.group.rank
    if shape.text is None:
        return []
    rows, found = shape.text_place(rank), []
    for index, name in enumerate("qkv"):
        buffer, mine = workspace.head_sharded(name, rank, shape, plan.request.torch_dtype), heads(name, rank, shape)
        if name != "q":
            found.append((index, rows, mine, buffer[:, slice(shape.text[0], sum(shape.text))]))
            continue
        by_chunk = (shape.batch, shape.num_ranks, shape.local_seq, *buffer.shape[2:])
        chunks = buffer.view(by_chunk).transpose(0, 1)
        places = [shape.text_place(owner) for owner in workspace.owners]
        if places == [rows] * len(places):  # one copy, broadcast over the chunks
            found.append((index, rows, mine, chunks[:, :, rows]))
        else:
            found += [(index, rows, mine, chunk[:, place]) for chunk, place in zip(chunks, places)]
    return found
