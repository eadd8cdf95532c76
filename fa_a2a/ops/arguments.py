"""What a single argument of a call may be, in eager code and as torch.compile traces it."""

from __future__ import annotations

import sys
from numbers import Integral, Real
from typing import Any

import torch

from ..errors import ConfigurationError, FaA2AError

_SHOWN = 200  # characters of a value: every rank gets every rank's error


def scale_problem(scale: object) -> FaA2AError | None:
    """Why this is no factor of the scores, or None."""
    if scale is None or (is_number(scale) and is_finite(scale)):
        return None
    return ConfigurationError(f"scale must be a finite number or None, got {shown(scale)}")


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
