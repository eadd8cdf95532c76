"""The attention function that diffusers' dispatcher calls, and which way each call goes.

The dispatcher hands over local (batch, seq / P, heads, head_dim) tensors and `_parallel_config`; with one, the backend
owns both exchanges. The ways:

  no parallel config       local attention on what it got: a model on one GPU, and Wan's cross-attention, whose keys and
                           values are whole on every rank. torch's SDPA, through diffusers' own function
  Ulysses, plain call or   UlyssesAttention: the fused exchange where it runs
  grouped queries
  Ulysses, padded text     likewise with key lengths, in models that `parallelize` has prepared for it (joint.py)
  Ulysses, other masks,    collectives around torch's SDPA (masked.py), since the fused kernels take none of these;
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
from . import joint, masked
from .joint import Joint

NAME = "fa_a2a"
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
    "attention with other keys than queries, or with a mask that is not known to be of padded text, takes collectives "
    "around torch's attention: the fused path takes self-attention with key lengths only"
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
    layer, padded = route.attention, joint.of(_parallel_config)
    error = _refusal(dropout_p, is_causal, return_lse, padded, attn_mask)
    if error is None and not masked.is_needed(query, key, value, attn_mask, enable_gqa):
        if padded is not None:
            return _with_lengths(query, key, value, padded, lambda *qkv, **kw: layer(*qkv, scale, **kw))
        out = layer(query, key, value, scale)
        assert isinstance(out, torch.Tensor)
        return out
    group = layer._resolve()
    if error is not None:
        find_plan(group, query, key, value, None, False, layer.kernel, layer.exchange, layer.timeout_s, refused=error)
    _tell(_MASKED)
    return masked.attend(masked.Call(query, key, value, attn_mask, scale, enable_gqa), group, layer.timeout_s)


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
    padded = joint.of(config)
    if (error := _refusal(dropout_p, is_causal, return_lse, padded, attn_mask)) is not None:
        raise error
    group = context._ulysses_mesh.get_group().group_name
    if masked.is_needed(query, key, value, attn_mask, enable_gqa):
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        out: torch.Tensor = masked.operator(query, key, value, attn_mask, group, factor, enable_gqa, _options.timeout_s)
        return out
    options = (group, _options.kernel, _options.exchange, scale, False, _options.timeout_s)
    if padded is not None:
        operator = schema.ulysses_attention
        return _with_lengths(query, key, value, padded, lambda *qkv, **kw: operator(*qkv, *options, **kw)[0])
    both: tuple[torch.Tensor, torch.Tensor] = schema.ulysses_attention(query, key, value, *options)
    return both[0]


def _with_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padded: Joint, layer: Callable[..., Any]
) -> torch.Tensor:
    """The layer with the forward's key lengths. They count text last, so text that comes first is moved behind the
    image and back."""
    text = padded.text
    if text > 0:
        q, k, v = (torch.cat([x[:, text:], x[:, :text]], 1) for x in (q, k, v))
    lengths = padded.tensor if torch.compiler.is_compiling() else padded.lengths
    out: torch.Tensor = layer(q, k, v, key_lengths=lengths, replicated_text=-abs(text))
    return torch.cat([out[:, -text:], out[:, :-text]], 1) if text > 0 else out


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


def owns_exchange(name: Any, context: Any) -> bool:
    """Whether attention with this backend of a processor, None for the active one, comes to `UlyssesAttention`."""
    if _options is None or context is None or context.ring_degree > 1 or context.ulysses_anything:
        return False
    return is_ours(name)


def is_ours(name: Any) -> bool:
    """Whether this backend of a processor, None for the active one, is fa_a2a's."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    active, _ = _AttentionBackendRegistry.get_active_backend()
    return bool((active if name is None else name) == NAME)


def _refusal(
    dropout_p: float, is_causal: bool, return_lse: bool, padded: Joint | None, attn_mask: torch.Tensor | None
) -> FaA2AError | None:
    if dropout_p:
        return UnsupportedError(f"dropout_p={dropout_p} in sequence-parallel attention; there is no backward, pass 0.0")
    if is_causal:
        return UnsupportedError(
            "is_causal=True in sequence-parallel attention: where text and image are sharded both, the gathered order "
            "of the tokens is not the model's, so what comes before what cannot be known here; set another backend"
        )
    if padded is not None and attn_mask is not None:
        return UnsupportedError(
            "a mask of attention's own beside the padded text of the model's; leave one of them out"
        )
    if return_lse:
        return UnsupportedError("return_lse=True through diffusers; call fa_a2a.UlyssesAttention for the log-sum-exp")
    return None


def _tell(text: str) -> None:
    if text not in _told:
        _told.add(text)
        log.warning("%s", text)
