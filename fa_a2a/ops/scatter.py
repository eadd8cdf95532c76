"""The exchange before attention on the fused path: stores into the peers' Q, K and V instead of collectives.

On GPUs one kernel stores every slice, publishes and waits; between CPU processes torch copies do the same in steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ..comm.workspace import Workspace
from . import fused
from .kernels import Qkv, loadable
from .plan import Plan
from .trace import step

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]


class Prepared:
    """What does not change from call to call of one plan on one workspace: where the slices go, and who takes them."""

    def __init__(self, plan: Plan, workspace: Workspace) -> None:
        by = _by_kernel if workspace.memory.device.type == "cuda" else _by_copies
        self.store = by(plan, workspace)


def scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, workspace: Workspace, timeout_s: float
) -> Qkv:
    """Stores each head slice of q, k, v (B, s, H, D) into its owner's buffers, and waits for the peers' slices.

    Returns this rank's Q, K, V (B, S, h, D), views of the workspace; Q's rows are in chunk order, so that the attention
    kernel finds each owner's queries where its strides put them.
    """
    workspace.take_turn("scatter")
    workspace.order_streams()
    prepared = workspace.prepare(Prepared, plan)
    with step("scatter_heads", q.device):
        workspace.poison_output()
        try:
            prepared.store(q, k, v, timeout_s)
        except BaseException as error:
            workspace.poison(error)
            raise
    return workspace.prepare(fused.Prepared, plan).qkv


@lru_cache(maxsize=32)
def load(device: torch.device, dtype: str, head_dim: int) -> Callable[..., None]:
    """The GPU kernel; compiles it, or takes it from the cache, before it returns."""
    from fa4_a2a.scatter import load_scatter

    kernel: Callable[..., None] = load_scatter(
        head_dim, dtype, "sm_{}{}a".format(*torch.cuda.get_device_capability(device))
    )
    return kernel


def _by_kernel(plan: Plan, workspace: Workspace) -> Store:
    from fa4_a2a.scatter import ScatterPlan

    from ..comm.nvshmem import Nvshmem

    shape, memory, ranks = plan.shape, workspace.memory, range(workspace.group.size)
    assert isinstance(memory, Nvshmem)
    launch = ScatterPlan(
        load(memory.device, plan.request.dtype, shape.head_dim),
        (shape.batch, shape.local_seq, shape.num_heads, shape.head_dim),
        workspace.group.rank,
        [[workspace.address(name, rank) for rank in ranks] for name in "qkv"],
        workspace.my_chunk_at,
        memory.signal_table(workspace.signals),
        memory.record_address,
        torch.cuda.get_device_properties(memory.device).multi_processor_count,
    )

    def store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, timeout_s: float) -> None:
        deadline_ns = int(timeout_s * 1e9)
        launch(loadable(q), loadable(k), loadable(v), fingerprint=plan.fingerprint, deadline_ns=deadline_ns)

    return store


def _by_copies(plan: Plan, workspace: Workspace) -> Store:
    shape, rank = plan.shape, workspace.group.rank

    def there(name: str, peer: int) -> torch.Tensor:
        at = workspace.my_chunk_at[peer] if name == "q" else rank
        rows = slice(at * shape.local_seq, (at + 1) * shape.local_seq)
        return workspace.head_sharded(name, peer, shape, plan.request.torch_dtype)[:, rows]

    def heads(peer: int) -> slice:
        return slice(peer * shape.local_heads, (peer + 1) * shape.local_heads)

    slices = [(i, heads(peer), there(name, peer)) for i, name in enumerate("qkv") for peer in workspace.owners]

    def store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, timeout_s: float) -> None:
        tensors = (q, k, v)
        for index, mine, destination in slices:
            destination.copy_(tensors[index][:, :, mine])
        workspace.announce(plan.fingerprint, timeout_s)

    return store
