"""From a call's arguments to what every rank will do: agreement between the ranks, then one plan.

Agreement is what makes bad input one clear error on every rank. A configuration that the group has not seen is
exchanged over the host channel before anything is compiled, allocated or stored; from then on its fingerprint travels
with the data, and a rank that departs from the others ends the call everywhere.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from .. import config
from ..comm.group import Group
from ..errors import ConfigurationError, FaA2AError, PeerMismatchError, PeerTimeoutError
from ..layout import ExchangeShape, fingerprint
from . import advice, differences, kernel_choice, kernels
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
    if isinstance(request, Request):
        mine: dict[str, str | None] = {"request": json.dumps(asdict(request)), "error": None}
        for name in kernels.KERNELS:
            of_request = (request.torch_dtype, request.head_dim, request.with_lse, request.causal)
            mine[name] = kernels.problem(name, device, *of_request) or scale_problem(name, request.scale)
            mine[kernel_choice.uncompiled_key(name)] = kernels.uncompiled(name, device, *of_request[:2])
        mine[advice.GPU] = advice.gpu_of(device)
    else:
        mine = {"request": None, "error": f"{type(request).__name__}: {request}"}
    if group.size == 1:
        if isinstance(request, FaA2AError):
            raise request
        return [mine]

    def watch(has_come: Callable[[int], bool]) -> None:
        """Peers that have begun a call this rank knows nothing of are not coming to agree: end theirs, too. One that
        has come was through with this exchange before its call."""
        ahead = [] if group.workspace is None else group.workspace.peers_ahead()
        if group.workspace is None or not (ahead := [r for r in ahead if not has_come(r)]):
            return
        group.workspace.abort()
        what = (
            str(request)
            if isinstance(request, FaA2AError)
            else differences.from_known(request, [plan.request for plan in group.plans.values()])
        )
        message = f"rank {group.rank} departs from a call that ranks {ahead} have begun: {what}"
        group.poisoned = message
        raise PeerMismatchError(
            f"{message}; shapes, dtypes and options must be the same on every rank; call fa_a2a.close(group) on every "
            "rank, then go on"
        )

    try:
        reports = group.exchange("agreement on the arguments", mine, timeout_s, watch)
    except PeerTimeoutError as error:
        raise (request if isinstance(request, FaA2AError) else error) from error
    errors = {r: report["error"] for r, report in enumerate(reports) if report["error"]}
    kinds = {str(text).partition(":")[0] for text in errors.values()}
    if len(errors) == group.size and len(kinds) == 1 and isinstance(request, FaA2AError):
        raise request  # texts may differ, in a device's number say
    if errors:
        raise PeerMismatchError("; ".join(f"rank {r}: {text}" for r, text in errors.items()))
    differences.compare(reports)
    return reports


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
    kernel, why_kernel = kernel_choice.choose(group, request, reports, device)
    exchange, why_exchange = choose_exchange(group, request, kernel, device, timeout_s)
    if request.exchange == "auto" and exchange == "fused" and request.is_plain and shape.is_equal:
        exchange, why_exchange = advice.exchange(request, kernel, reports) or (exchange, why_exchange)
    overlapped, why_overlapped = choose_overlap(group, request, kernel, exchange, device)
    failure: Exception | None = None
    adapter = None
    fused, limit = exchange == "fused", config.default_number("FA_A2A_COMPILE_TIMEOUT_S")
    try:
        limit = config.read_number("FA_A2A_COMPILE_TIMEOUT_S")
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
    except Exception as error:  # told to the others below, then raised
        failure = error
    if group.size > 1:
        told = group.exchange("compilation", None if failure is None else f"{type(failure).__name__}: {failure}", limit)
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
        group.workspace.reserve(shape, timeout_s)
    default = (
        "the first choice of auto, which runs here" if "auto" in (request.kernel, request.exchange) else "as asked for"
    )
    reason = "; ".join(r for r in (why_kernel, why_exchange, why_overlapped) if r) or default
    if (kernel, exchange, reason) not in _told and "falls back" in reason:
        log.warning("%s", reason)
    _told.add((kernel, exchange, reason))
    return Plan(kernel, exchange, reason, shape, request, mark, adapter, overlapped)


_told: set[tuple[str, str, str]] = set()
