"""What a single argument of a call may be, in eager code and as torch.compile traces it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch

from ..errors import ConfigurationError, FaA2AError, UnsupportedError

_NO_MASK = "masks are not taken: padded keys are key_lengths=[...], a causal mask is causal=True"
_ELSEWHERE = {  # of torch's scaled_dot_product_attention and diffusers' dispatcher
    **dict.fromkeys(("attn_mask", "mask", "attention_mask"), _NO_MASK),
    "is_causal": "it is named causal",
    "dropout_p": "there is no dropout",
    "enable_gqa": "k and v with fewer heads are grouped-query attention without it",
}
_OF_THE_MODULE = ("group", "kernel", "exchange", "copy", "timeout_s")
_SHOWN = 200  # characters of a value: every rank gets every rank's error


def scale_problem(scale: object) -> FaA2AError | None:
    """Why this is no factor of the scores, or None."""
    if scale is None or (is_number(scale) and is_finite(scale)):
        return None
    hint = f"; {_NO_MASK}" if isinstance(scale, torch.Tensor) and scale.dim() > 0 else ""
    return ConfigurationError(f"scale must be a finite number or None, got {shown(scale)}{hint}")


def unknown_problem(names: Iterable[str]) -> FaA2AError:
    """Why a call takes no argument of the first of these names; the way out for those that attention has elsewhere."""
    name = next(iter(names))
    if name in _OF_THE_MODULE:
        return ConfigurationError(f"{name} is an argument of the module: UlyssesAttention({name}=...), not of its call")
    way_out = _ELSEWHERE.get(name, "see help(fa_a2a.UlyssesAttention.forward) for what it takes")
    return UnsupportedError(f"UlyssesAttention takes no argument {name!r}: {way_out}")


def flag_problem(name: str, flag: object) -> FaA2AError | None:
    return None if isinstance(flag, bool) else ConfigurationError(f"{name} must be True or False, got {shown(flag)}")


def is_number(value: object) -> bool:
    """Numbers of other packages are numbers; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    number: float = value if isinstance(value, int) else float(value)  # not float(10**400)
    return -sys.float_info.max <= number <= sys.float_info.max


def shown(value: object) -> str:
    """As errors quote it. torch.compile makes tensors of numpy's numbers, and knows no tensor's values."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    text = f"numpy's {type(value).__name__}" if type(value).__module__ == "numpy" else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def is_integer(value: object) -> bool:
    """Of 64 bits: what the operator takes."""
    known = isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)
    return known and -(1 << 63) <= value < 1 << 63  # type: ignore[operator]


def are_integers(values: object) -> bool:
    return isinstance(values, (list, tuple)) and len(values) > 0 and all(is_integer(value) for value in values)
