"""The attention function that diffusers' dispatcher calls, and which way each call goes.

The dispatcher hands over local (batch, seq / P, heads, head_dim) tensors and `_parallel_config`; with one, the backend
owns both exchanges. The ways:

  no parallel config       local attention on what it got: a model on one GPU, and Wan's cross-attention, whose keys and
                           values are whole on every rank. torch's SDPA, through diffusers' own function
  Ulysses, plain call      UlyssesAttention: the fused exchange where it runs
  Ulysses, mask, GQA,      collectives around torch's SDPA (masked.py), since the fused kernels take none of these yet;
  other keys than queries  said once in the log
  ring, "anything" modes   diffusers' own parallel attention, said once in the log
What none of these carries out is refused on every rank; attention over a shard alone is never the fallback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...comm.group import resolve
from ...errors import FaA2AError, UnsupportedError
from ...nn import UlyssesAttention
from ...ops import schema
from ...ops.functional import find_plan
from . import masked

log = logging.getLogger("fa_a2a")

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Options:
    """What `enable` was asked for."""

    kernel: str
    exchange: str
    copy: bool
    timeout_s: float


@dataclass(frozen=True)
class _Route:
    """Where the calls under one parallel config go. Holds the config, so that its id stays its own."""

    config: Any
    attention: UlyssesAttention | None
    theirs: Function | None


_options: Options | None = None
_native: Function | None = None
_with_lse: Function | None = None
_routes: dict[int, _Route] = {}
_told: set[str] = set()
_MASKED = (
    "attention with a mask, grouped queries or other keys than queries takes collectives around torch's attention: the "
    "fused path takes plain self-attention only"
)


def configure(options: Options, native: Function, with_lse: Function) -> None:
    """native, with_lse: diffusers' functions for local attention and for ring, whose parts are merged by their LSE."""
    global _options, _native, _with_lse
    _options, _native, _with_lse = options, native, with_lse
    _routes.clear()


def forget() -> None:
    global _options, _native, _with_lse
    _options = _native = _with_lse = None
    _routes.clear()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    """(batch, seq, heads, head_dim) in and out; the names of the arguments are diffusers'.

    attn_mask: over the keys, boolean or added to the scores: (batch, seq) or (batch or 1, heads or 1, 1, seq) with the
    keys this rank holds, sharded like them. dropout_p and is_causal are carried out without a parallel config only.
    Raises UnsupportedError for what no way carries out, and what UlyssesAttention raises.
    """
    given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
    if _parallel_config is None or _parallel_config.context_parallel_config is None:
        assert _native is not None
        return _native(*given)
    if torch.compiler.is_compiling():
        return _traced(_parallel_config, *given)
    route = _routes.get(id(_parallel_config))
    if route is None:
        route = _find_route(_parallel_config)
    if route.attention is None:
        assert route.theirs is not None
        return route.theirs(*given, _parallel_config=_parallel_config)
    layer = route.attention
    if not (dropout_p or is_causal or return_lse or masked.is_needed(query, key, value, attn_mask)):
        out = layer(query, key, value, scale)
        assert isinstance(out, torch.Tensor)
        return out
    group = layer._resolve()
    if (error := _refusal(dropout_p, is_causal, return_lse)) is not None:
        find_plan(group, query, key, value, None, False, layer.kernel, layer.exchange, layer.timeout_s, refused=error)
    _tell(_MASKED)
    return masked.attend(query, key, value, attn_mask, scale, enable_gqa, group, layer.timeout_s)


def _traced(
    config: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
) -> torch.Tensor:
    """The same choice as torch.compile sees it: operators, and the group by name."""
    assert _options is not None
    context = config.context_parallel_config
    if (theirs := _handed_over(context, query.device.type)[0]) is not None:
        return theirs(
            *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse),
            _parallel_config=config,
        )
    if (error := _refusal(dropout_p, is_causal, return_lse)) is not None:
        raise error
    group = context._ulysses_mesh.get_group().group_name
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if masked.is_needed(query, key, value, attn_mask):
        out: torch.Tensor = masked.operator(query, key, value, attn_mask, group, factor, enable_gqa, _options.timeout_s)
        return out
    both: tuple[torch.Tensor, torch.Tensor] = schema.ulysses_attention(
        query, key, value, group, _options.kernel, _options.exchange, factor, False, _options.timeout_s
    )
    return both[0]


def _find_route(config: Any) -> _Route:
    assert _options is not None
    context = config.context_parallel_config
    theirs, why = _handed_over(context, context._device.type)
    if theirs is not None:
        _tell(f"attention is left to diffusers' own parallel path: {why}")
        route = _Route(config, None, theirs)
    else:
        group = resolve(context._ulysses_mesh)
        options = (_options.kernel, _options.exchange, _options.copy, _options.timeout_s)
        route = _Route(config, UlyssesAttention(group.handle, *options), None)
    _routes[id(config)] = route
    return route


def _handed_over(context: Any, device: str) -> tuple[Function | None, str]:
    """diffusers' function for a way of parallelism that is not plain Ulysses, and why; None for plain Ulysses."""
    if context.ring_degree > 1:
        if device != "cuda":
            raise UnsupportedError(
                f"ring_degree={context.ring_degree} needs an attention that returns its log-sum-exp, which diffusers "
                f"has on GPUs only; use ContextParallelConfig(ulysses_degree=...) on {device}"
            )
        return _with_lse, f"ring_degree={context.ring_degree}, and this backend replaces Ulysses"
    if context.ulysses_anything:
        return _native, "ulysses_anything=True, and this backend takes equal shards"
    return None, ""


def _refusal(dropout_p: float, is_causal: bool, return_lse: bool) -> FaA2AError | None:
    if dropout_p:
        return UnsupportedError(f"dropout_p={dropout_p} in sequence-parallel attention; there is no backward, pass 0.0")
    if is_causal:
        return UnsupportedError(
            "is_causal=True in sequence-parallel attention: where text and image are sharded both, the gathered order "
            "of the tokens is not the model's, so what comes before what cannot be known here; set another backend"
        )
    if return_lse:
        return UnsupportedError("return_lse=True through diffusers; call fa_a2a.UlyssesAttention for the log-sum-exp")
    return None


def _tell(text: str) -> None:
    if text not in _told:
        _told.add(text)
        log.warning("%s", text)
