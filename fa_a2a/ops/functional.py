"""The functions beneath UlyssesAttention, one for each half of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import config
from ..comm.group import Group, resolve
from ..errors import ConfigurationError, FaA2AError, ShapeError, WorkspaceError
from . import fused, layer, overlap, scatter, serial
from .deadlines import deadline, own_options
from .kernels import Qkv
from .norm_rope import NormRope
from .options import PLAIN, Options
from .options import key as options_key
from .plan import MAX_KNOWN, Plan, Request, check_choices, is_deadline, make_request, settle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class HeadShards:
    """Head-sharded q, k, v between the two exchanges. Opaque: on the fused path Q's rows are rotated by rank and the
    tensors are views of the workspace, so they must not be taken for (batch, seq, heads, head_dim) tensors."""

    _q: torch.Tensor
    _k: torch.Tensor
    _v: torch.Tensor
    _group: Group
    _plan: Plan
    _call: object  # the workspace's call that holds them; the workspace itself for tensors that no call holds

    def __repr__(self) -> str:
        return f"HeadShards({self._plan.shape}, kernel={self._plan.kernel!r}, exchange={self._plan.exchange!r})"

    @classmethod
    def from_tensors(
        cls,
        q_BShD: torch.Tensor,
        k_BShD: torch.Tensor,
        v_BShD: torch.Tensor,
        group: ProcessGroup | DeviceMesh | str | None = None,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        kernel: str = "auto",
        exchange: str = "auto",
        timeout_s: float | None = None,
        causal: bool = False,
        key_lengths: torch.Tensor | Sequence[int] | None = None,
        shard_sizes: Sequence[int] | None = None,
        replicated_text: int | None = None,
    ) -> HeadShards:
        """Wraps tensors that are head-sharded already: (B, S, h, D), rows in the order of the whole sequence,
        replicated text once, and as many heads on every rank. Q is copied into the order that the fused path wants.
        Raises like `scatter_heads`."""
        where = resolve(group)
        options = Options(causal, key_lengths, shard_sizes, replicated_text)
        plan = find_plan(where, q_BShD, k_BShD, v_BShD, scale, return_lse, kernel, exchange, timeout_s, True, options)
        if plan.exchange == "fused":
            assert where.workspace is not None  # made with the plan
            q_BShD = scatter.in_chunk_order(q_BShD, plan.shape, where.workspace.owners)
        return cls(q_BShD, k_BShD, v_BShD, where, plan, where.workspace)


def find_plan(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    return_lse: bool,
    kernel: str,
    exchange: str,
    timeout_s: float | None,
    head_sharded: bool = False,
    options: Options = PLAIN,
    refused: FaA2AError | None = None,
) -> Plan:
    try:
        seconds = deadline(timeout_s)
    except ConfigurationError as error:  # of this rank's environment: the others must hear of it, too
        seconds, refused = config.default_number("FA_A2A_TIMEOUT_S"), refused or error
    # Host time matters: what was settled before is found again by what the caller passed, without making a Request.
    key: object = None
    told = options_key(options, q) if refused is None else None
    plain = isinstance(kernel, str) and isinstance(exchange, str) and isinstance(return_lse, bool)  # 1 equals True
    if told is not None and plain and (scale is None or isinstance(scale, float)) and is_deadline(seconds):
        grad = torch.is_grad_enabled()
        key = (
            *(_signature(q, grad), _signature(k, grad), _signature(v, grad)),
            *(scale, return_lse, kernel, exchange, head_sharded, told),
        )
    settled = group.settled.get(key)
    if settled is not None:
        group.check_usable()
        if group.workspace is not None:
            group.workspace.check(seconds)
        return settled
    request: Request | FaA2AError
    try:
        if refused is not None:
            raise refused
        check_choices(kernel, exchange, seconds)
        request = make_request(
            q,
            k,
            v,
            group,
            kernel=kernel,
            exchange=exchange,
            scale=scale,
            with_lse=return_lse,
            head_sharded=head_sharded,
            options=options,
        )
    except Exception as error:
        request = error if isinstance(error, FaA2AError) else _unreadable(error)
        if not is_deadline(seconds):
            seconds = deadline(None)  # the others must hear of it all the same
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    plan = settle(group, request, device, seconds)
    if key is not None and (plan.request.device == "cuda" or plan.exchange == "fused"):
        if len(group.settled) >= MAX_KNOWN:
            group.settled.clear()
        group.settled[key] = plan
    return plan


def _signature(t: torch.Tensor, grad: bool) -> object:
    """What of a tensor decides whether a call is taken; the type of what is no tensor."""
    if not isinstance(t, torch.Tensor):
        return type(t)
    return type(t), t.layout, t.shape, t.dtype, t.device, grad and t.requires_grad


def _unreadable(error: Exception) -> ConfigurationError:
    """For an argument whose own methods raise: the others must hear of it, too."""
    refused = ConfigurationError(f"the arguments cannot be read: {type(error).__name__}: {error}")
    refused.__cause__ = error
    return refused


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scatter_heads(
    q_BsHD: torch.Tensor,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    group: ProcessGroup | DeviceMesh | str | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    exchange: str = "auto",
    timeout_s: float | None = None,
    causal: bool = False,
    key_lengths: torch.Tensor | Sequence[int] | None = None,
    shard_sizes: Sequence[int] | None = None,
    replicated_text: int | None = None,
    whole_kv: bool = False,
    norm_rope: NormRope | None = None,
) -> HeadShards:
    """The exchange before attention: each rank gives its tokens of all heads and gets all tokens of its heads.

    q, k, v: (batch, rows, heads, head_dim), this rank's rows, any strides with contiguous head_dim; bfloat16 or
    float16, on CPUs also float32. k and v may have fewer heads, by a factor (grouped-query attention). Every rank of
    `group` calls it with the same shapes and options; shards that are not equal are told by shard_sizes.
    scale: factor of the scores, head_dim**-0.5 by default. timeout_s: deadline for the peers, in seconds.
    causal to norm_rope: as for UlyssesAttention.
    Returns HeadShards for `attention_gather`, which must be the next call on this group.
    Raises ShapeError, UnsupportedError, ConfigurationError for bad input, the same on every rank; PeerMismatchError
    where ranks differ; PeerTimeoutError where one does not come; WorkspaceError out of order or after an error.
    Source: DeepSpeed Ulysses (arXiv:2309.14509).
    """
    where = resolve(group)
    options = Options(causal, key_lengths, shard_sizes, replicated_text, whole_kv, norm_rope)
    refused = _WHOLE_LAYER if isinstance(exchange, str) and exchange == "overlapped" else None
    plan = find_plan(
        *(where, q_BsHD, k_BsHD, v_BsHD, scale, return_lse, kernel, exchange, timeout_s, False, options, refused)
    )
    return scattered(where, plan, (q_BsHD, k_BsHD, v_BsHD), deadline(timeout_s), norm_rope)


_WHOLE_LAYER = ConfigurationError(
    "exchange='overlapped' is one kernel for the whole layer and has no first half; use UlyssesAttention, or 'fused'"
)


def left_to_kernel(qkv: Qkv, plan: Plan, norm_rope: NormRope | None) -> tuple[Qkv, NormRope | None]:
    """q, k, v, and what the scattering kernel is still to apply to them: all of it, or nothing more."""
    if norm_rope is None or plan.norm_rope_in_kernel:
        return qkv, norm_rope
    return (*norm_rope.applied(*qkv[:2]), qkv[2]), None


def scattered(where: Group, plan: Plan, qkv: Qkv, seconds: float, norm_rope: NormRope | None = None) -> HeadShards:
    """The exchange before attention as the plan says."""
    qkv, norm_rope = left_to_kernel(qkv, plan, norm_rope)
    if plan.shape.num_ranks == 1:  # a group of one rank, or whole K and V on each
        return HeadShards(*qkv, where, plan, None)
    if plan.exchange == "collective":
        return HeadShards(*serial.scatter(*qkv, where, plan.shape), where, plan, None)
    assert where.workspace is not None
    parts = scatter.scatter(*qkv, plan, where.workspace, seconds, norm_rope)
    return HeadShards(*parts, where, plan, where.workspace.call)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_gather(
    shards: HeadShards, *, copy: bool = False, timeout_s: float | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with the exchange after it inside.

    Returns (out, lse): out (batch, rows, heads, head_dim) in the inputs' dtype; lse (batch, heads, rows) float32, the
    natural logarithm of the sum of exponentiated scaled scores, or None if scatter_heads was not asked for it.
    On the fused path both are views of the workspace, valid until the next call on the same group; copy=True returns
    ordinary tensors. Raises PeerTimeoutError and WorkspaceError like `scatter_heads`; ConfigurationError for a wrong
    copy or timeout_s, after the peers got what they wait for: the shards are used up then.
    Source: the exchange rides on the kernel's own stores, arXiv:2607.23264.
    """
    seconds, refused = own_options(timeout_s, copy)
    gathering = gathered(shards, refused is None and copy, seconds)
    if refused is not None:
        raise refused
    return gathering


def whole_layer(
    group: Group, plan: Plan, qkv: Qkv, copy: bool, seconds: float, norm_rope: NormRope | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both halves in one call, as a plan that `find_plan` has just found says."""
    workspace = group.workspace
    if plan.exchange == "collective" or workspace is None:
        return gathered(scattered(group, plan, qkv, seconds, norm_rope), copy, seconds)
    if plan.overlapped:
        out, lse = overlap.attend(qkv, plan, workspace, seconds)
    else:
        qkv, norm_rope = left_to_kernel(qkv, plan, norm_rope)
        out, lse = layer.run(qkv, plan, workspace, seconds, norm_rope)
    return handed_out(out, lse, copy)


def handed_out(out: torch.Tensor, lse: torch.Tensor | None, copy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if copy:
        return out.clone(), None if lse is None else lse.clone()
    if torch.is_grad_enabled():
        # what requires grad and is put into them in place would else tie a graph to the buffers
        return out.detach(), None if lse is None else lse.detach()
    return out, lse


def gathered(shards: HeadShards, copy: bool, seconds: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention and the exchange after it as the shards' plan says."""
    if not isinstance(shards, HeadShards):
        raise ShapeError(f"attention_gather takes what scatter_heads returned, got {type(shards).__name__}")
    group, plan = shards._group, shards._plan
    group.check_usable()
    if plan.exchange == "collective":
        return serial.attend(shards._q, shards._k, shards._v, plan, group)
    workspace = group.workspace
    if workspace is None or not (shards._call is workspace or shards._call is workspace.call):
        raise WorkspaceError(
            "these HeadShards were used already, or belong to an earlier call or a closed workspace; calls on a "
            "workspace alternate: one attention_gather for each scatter_heads"
        )
    workspace.check(seconds)
    if shards._call is workspace:
        fused.announce(plan, workspace, seconds)
    out, lse = fused.attend(shards._q, shards._k, shards._v, plan, workspace, seconds)
    return handed_out(out, lse, copy)
