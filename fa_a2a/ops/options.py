"""The options of a call beside its tensors, as the caller passes them and as the ranks compare them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import ConfigurationError, FaA2AError, ShapeError, UnsupportedError
from .arguments import are_integers, flag_problem, is_integer, shown
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
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
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
    except Exception:  # which `checked` meets again, to tell it to the other ranks
        return None


def checked(options: Options) -> Checked:
    """The options' values. Raises ShapeError, ConfigurationError or UnsupportedError."""
    causal, lengths, sizes, text, whole_kv, norm_rope = options
    if (refused := problem(options)) is not None:
        raise refused
    if isinstance(lengths, torch.Tensor):
        lengths = _read(lengths)
    return Checked(
        causal,
        None if lengths is None else tuple(map(int, lengths)),
        None if sizes is None else tuple(map(int, sizes)),
        int(text or 0),
        whole_kv,
        None if norm_rope is None else norm_rope.layout,
    )


def problem(options: Options) -> FaA2AError | None:
    """Why options are refused whatever the tensors, or None. Reads no tensor, so torch.compile traces it."""
    causal, lengths, sizes, text, whole_kv, norm_rope = options
    if (refused := flag_problem("causal", causal) or flag_problem("whole_kv", whole_kv)) is not None:
        return refused
    if sizes is not None and not are_integers(sizes):
        return ShapeError(f"shard_sizes must be a list of integers, got {shown(sizes)}")
    if text is not None and not is_integer(text):
        return ConfigurationError(f"replicated_text must be a number of rows or None, got {shown(text)}")
    if norm_rope is not None and not isinstance(norm_rope, NormRope):
        return ConfigurationError(f"norm_rope must be a fa_a2a.NormRope or None, got {type(norm_rope).__name__}")
    if lengths is not None and not isinstance(lengths, torch.Tensor) and not are_integers(lengths):
        return ShapeError(f"key_lengths must be a list of integers, got {shown(lengths)}")
    if whole_kv and (causal or sizes is not None or text or norm_rope is not None):
        return UnsupportedError(WHOLE_KV_ALONE)
    return None


def _read(lengths: torch.Tensor) -> list[int]:
    if lengths.dim() != 1 or lengths.dtype not in _INTEGERS or lengths.layout != torch.strided:
        kind = f"{lengths.dtype} {tuple(lengths.shape)}"
        raise ShapeError(f"key_lengths must be one-dimensional with integers, got a tensor of {kind}")
    if lengths.is_meta:
        raise ShapeError("key_lengths must have values, got a tensor on the meta device; pass a list")
    if lengths.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            "key_lengths on a GPU cannot be read while a CUDA graph is captured; pass a list, .tolist() of it"
        )
    values: list[int] = lengths.tolist()
    if not values:
        raise ShapeError("key_lengths must have a number for each batch entry, got an empty tensor")
    return values
