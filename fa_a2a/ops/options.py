"""The options of a call beside its tensors, as the caller passes them and as the ranks compare them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

import torch

from ..errors import ConfigurationError, FaA2AError, ShapeError, UnsupportedError
from .norm_rope import NormRope


class Options(NamedTuple):
    """Which keys a query sees, and which rows a rank holds; the same on every rank.

    causal: token i sees tokens 0 to i of the whole sequence.
    key_lengths: integers, one for each batch entry: the keys of the whole sequence that take part, from its beginning.
        A list or a tensor; a tensor on a GPU is read by the host, which waits for it.
    shard_sizes: tokens of each rank, in rank order, replicated text not counted. None: equal shards.
    replicated_text: rows of text that q, k and v hold on every rank beside their own tokens, as in slicing: n > 0 for
        the first n rows, n < 0 for the last -n.
    whole_kv: k and v are the whole ones on every rank (cross-attention); q holds this rank's rows, however many.
    norm_rope: RMS-norm and rotary embedding of q and k, before they leave this rank.
    """

    causal: bool = False
    key_lengths: torch.Tensor | Sequence[int] | None = None
    shard_sizes: Sequence[int] | None = None
    replicated_text: int | None = None
    whole_kv: bool = False
    norm_rope: NormRope | None = None


class Checked(NamedTuple):
    """The same as plain values."""

    causal: bool
    key_lengths: tuple[int, ...] | None
    shard_sizes: tuple[int, ...] | None
    replicated_text: int
    whole_kv: bool
    norm_rope: tuple[str, ...] | None  # its layout


WHOLE_KV_ALONE = (
    "whole_kv goes with key_lengths alone: nothing is exchanged, so causal, shard_sizes, replicated_text and norm_rope "
    "have no meaning; leave them out"
)
PLAIN = Options()
PLAIN_KEY = Checked(False, None, None, 0, False, None)


def key(options: Options, q: torch.Tensor) -> Checked | None:
    """What tells options apart from call to call, or None for what is refused: by `checked`, or beside this q."""
    if options is PLAIN:
        return PLAIN_KEY
    try:
        found = checked(options)
        if options.norm_rope is not None:
            if not isinstance(q, torch.Tensor) or q.dim() != 4:
                return None
            options.norm_rope.check(q)
        return found
    except FaA2AError:
        return None


def checked(options: Options) -> Checked:
    """The options' values. Raises ShapeError, ConfigurationError or UnsupportedError."""
    causal, lengths, sizes, text, whole_kv, norm_rope = options
    for name, flag in (("causal", causal), ("whole_kv", whole_kv)):
        if not isinstance(flag, bool):
            raise ConfigurationError(f"{name} must be True or False, got {flag!r}")
    counts = _integers("shard_sizes", sizes)
    if text is not None and not _is_integer(text):
        raise ConfigurationError(f"replicated_text must be a number of rows or None, got {text!r}")
    if norm_rope is not None and not isinstance(norm_rope, NormRope):
        raise ConfigurationError(f"norm_rope must be a fa_a2a.NormRope or None, got {type(norm_rope).__name__}")
    found = Checked(
        causal,
        _integers("key_lengths", lengths),
        counts,
        int(text or 0),
        whole_kv,
        None if norm_rope is None else norm_rope.layout,
    )
    if whole_kv and (causal or counts is not None or text or norm_rope is not None):
        raise UnsupportedError(WHOLE_KV_ALONE)
    return found


def _is_integer(value: object) -> bool:
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def _integers(name: str, values: torch.Tensor | Sequence[int] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.is_floating_point() or values.dtype == torch.bool:
            raise ShapeError(
                f"{name} must be one-dimensional with integers, got a tensor of {values.dtype} {tuple(values.shape)}"
            )
        if values.is_meta:
            raise ShapeError(f"{name} must have values, got a tensor on the meta device; pass a list")
        if values.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                f"{name} on a GPU cannot be read while a CUDA graph is captured; pass a list, .tolist() of it"
            )
        values = values.tolist()
    if not isinstance(values, (list, tuple)) or not values or not all(map(_is_integer, values)):
        raise ShapeError(f"{name} must be a list of integers, got {values!r}")
    return tuple(int(value) for value in values)
