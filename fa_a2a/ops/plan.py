"""From a call's arguments to what every rank will do: agreement between the ranks, then one plan.

Agreement is what makes bad input one clear error on every rank. A configuration that the group has not seen is
exchanged over the host channel before anything is compiled, allocated or stored; from then on its fingerprint travels
with the data, and a rank that departs from the others ends the call everywhere.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field

import torch

from .. import config
from ..comm.group import Group
from ..errors import ConfigurationError, FaA2AError, PeerMismatchError
from ..layout import ExchangeShape, fingerprint
from . import advice, agreement, differences, kernel_choice, kernels
from .exchange_choice import choose_exchange, choose_overlap
from .kernels import AttentionKernel
from .norm_rope import KERNEL_HEAD_DIMS
from .pieces import heads_per_kv
from .request import Request, check_choices, check_deadline, is_deadline, make_request

__all__ = [  # with the parts of a request, so that a caller needs one module
    "MAX_KNOWN",
    "Plan",
    "Request",
    "check_choices",
    "check_deadline",
    "is_deadline",
    "make_request",
    "settle",
]

log = logging.getLogger("fa_a2a")

MAX_KNOWN = 4096  # configurations remembered for each group; the oldest is agreed on anew


@dataclass(frozen=True)
class Plan:
    """What a call does: `kernel` computes attention, `exchange` moves its output; `reason` says why these.

    overlapped: the layer is one call in which the exchange before attention is inside, too; `scatter_heads` and
    `attention_gather` of the same plan are the fused path.
    """

    kernel: str
    exchange: str
    reason: str
    shape: ExchangeShape
    request: Request = field(repr=False)
    fingerprint: int = field(repr=False)
    adapter: AttentionKernel = field(repr=False)
    overlapped: bool = False

    @property
    def norm_rope_in_kernel(self) -> bool:
        """Whether the scatter kernel applies norm and rotary embedding; torch operations do otherwise."""
        built = self.shape.is_equal and self.request.head_dim in KERNEL_HEAD_DIMS
        return self.exchange == "fused" and self.request.device == "cuda" and built


def settle(group: Group, request: Request | FaA2AError, device: torch.device, timeout_s: float) -> Plan:
    """The plan every rank of the group follows for this request; raises the same error on every rank otherwise.

    In steady state this is a dictionary look-up. A request that is an error is this rank's own failure: it is told to
    the others before it is raised.
    """
    group.check_usable()
    if group.workspace is not None:
        group.workspace.check(timeout_s)
    if isinstance(request, Request):
        mark = fingerprint(json.dumps(asdict(request)))
        plan = group.plans.get(mark)
        if plan is not None and not (group.size > 1 and _agree_each_time(plan)):
            return plan
    else:
        mark, plan = 0, None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if isinstance(request, FaA2AError):
            raise request
        raise ConfigurationError(
            "a CUDA graph can capture only calls that ran once before; run the call once, then capture"
        )
    reports = _agree(group, request, device, timeout_s)
    if plan is None:
        assert isinstance(request, Request)
        plan = _prepare(group, request, mark, reports, device, timeout_s)
        while len(group.plans) >= MAX_KNOWN:
            group.plans.pop(next(iter(group.plans)))
        group.plans[mark] = plan
    return plan


def _agree_each_time(plan: Plan) -> bool:
    """Collectives carry no fingerprint. Between CPU processes the exchange of words costs little, so each call is
    compared; on GPUs only new configurations are, since the host must not wait for its peers there."""
    return plan.exchange == "collective" and plan.request.device == "cpu"


def _agree(
    group: Group, request: Request | FaA2AError, device: torch.device, timeout_s: float
) -> list[dict[str, str | None]]:
    try:
        mine = _report(request, device)
    except Exception as error:  # of what only this rank's machine has: a folder that cannot be read, say
        request = ConfigurationError(f"what runs here cannot be told: {type(error).__name__}: {error}")
        request.__cause__ = error
        mine = agreement.report_of(request)
    if isinstance(request, FaA2AError):
        if group.size == 1:
            raise request
        return agreement.agree(group, mine, request, lambda: "", timeout_s)
    if group.size == 1:
        return [mine]
    asked = request
    known = group.plans.values()
    return agreement.agree(
        group, mine, None, lambda: differences.from_known(asked, [plan.request for plan in known]), timeout_s
    )


def _report(request: Request | FaA2AError, device: torch.device) -> dict[str, str | None]:
    """What this rank tells the others: the request, and which kernels could run it here; or why there is none."""
    if isinstance(request, FaA2AError):
        return agreement.report_of(request)
    mine: dict[str, str | None] = {"request": json.dumps(asdict(request)), "error": None}
    for name in kernels.KERNELS:
        of_request = (request.torch_dtype, request.head_dim, request.with_lse, request.causal)
        mine[name] = kernels.problem(name, device, *of_request) or scale_problem(name, request.scale)
        mine[kernel_choice.uncompiled_key(name)] = kernels.uncompiled(name, device, *of_request[:2])
    mine[advice.GPU] = advice.gpu_of(device)
    return mine


def scale_problem(kernel: str, scale: float) -> str | None:
    """Why the kernel cannot take this scale, or None. flash-attn-4 masks scores, keys past the end in the last tile
    among them, before it scales them: -inf times 0 is NaN, and times a negative number it is the largest score."""
    if kernel == "fa4" and scale <= 0:
        return f"kernel 'fa4' takes a scale above 0, got {scale:g}; for a negative one negate q"
    return None


def _prepare(
    group: Group,
    request: Request,
    mark: int,
    reports: list[dict[str, str | None]],
    device: torch.device,
    timeout_s: float,
) -> Plan:
    """Chooses the path, compiles the kernel and makes room in the workspace; every rank or none."""
    shape = request.shape(group.size)
    failure: Exception | None = None
    adapter = None
    with group.together():
        kernel, why_kernel = kernel_choice.choose(group, request, reports, device)
        exchange, why_exchange = choose_exchange(group, request, kernel, device, timeout_s)
        if request.exchange == "auto" and exchange == "fused" and request.is_plain and shape.is_equal:
            exchange, why_exchange = advice.exchange(request, kernel, reports) or (exchange, why_exchange)
        overlapped, why_overlapped = choose_overlap(group, request, kernel, exchange, device)
        limit = config.default_number("FA_A2A_COMPILE_TIMEOUT_S")
        try:
            limit = config.read_number("FA_A2A_COMPILE_TIMEOUT_S")
            adapter = _load(group, request, kernel, exchange == "fused", overlapped, device)
        except Exception as error:  # told to the others below, then raised
            failure = error
        if group.size > 1:
            text = None if failure is None else f"{type(failure).__name__}: {failure}"
            told = group.exchange("compilation", text, limit)
            failures = {r: text for r, text in enumerate(told) if text}
            if failure is None and failures:
                raise PeerMismatchError(
                    "; ".join(f"rank {r} could not prepare kernel '{kernel}': {t}" for r, t in failures.items())
                )
    if failure is not None:
        raise failure
    assert adapter is not None
    if exchange == "fused" and group.size > 1:
        assert group.workspace is not None
        with group.together():
            group.workspace.reserve(shape, timeout_s)
    default = (
        "the first choice of auto, which runs here" if "auto" in (request.kernel, request.exchange) else "as asked for"
    )
    reason = "; ".join(r for r in (why_kernel, why_exchange, why_overlapped) if r) or default
    if (kernel, exchange, reason) not in _told and "falls back" in reason:
        log.warning("%s", reason)
    _told.add((kernel, exchange, reason))
    return Plan(kernel, exchange, reason, shape, request, mark, adapter, overlapped)


def _load(
    group: Group, request: Request, kernel: str, fused: bool, overlapped: bool, device: torch.device
) -> AttentionKernel:
    """The kernel's adapter, compiled; on GPUs with what stores q, k, v before it."""
    shape = request.shape(group.size)
    grouped = heads_per_kv(shape, group.rank if shape.num_ranks > 1 else 0)
    adapter = kernels.load(
        *(kernel, device, request.torch_dtype, request.head_dim, request.with_lse, fused),
        *((grouped, request.causal) if kernel in kernels.BUILT else ()),
    )
    if fused and device.type == "cuda" and not request.head_sharded:
        from . import overlap, scatter

        scatter.load(device, request.dtype, request.head_dim, shape.is_equal, request.norm_rope)
        if overlapped:
            overlap.load(device, request.dtype, request.head_dim, request.with_lse)
    return adapter


_told: set[tuple[str, str, str]] = set()
