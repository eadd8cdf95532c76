"""Environment variables: this module is the only one that reads them. The README's table is made from VARIABLES."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import ConfigurationError


@dataclass(frozen=True)
class Variable:
    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable("FA_A2A_CACHE_DIR", "~/.cache/fa_a2a", "folder of compiled kernels"),
    Variable("FA_A2A_TIMEOUT_S", "30", "default deadline for a peer, in seconds"),
    Variable("FA_A2A_COMPILE_TIMEOUT_S", "600", "how long ranks wait for one another's kernels to compile, in seconds"),
    Variable(
        "FA_A2A_ARENA_MIB", "1024", "symmetric memory shared by the workspaces of sub-groups, in MiB for each GPU"
    ),
    Variable("FA_A2A_DEBUG", "0", "1: fill outputs with NaN before each call and check the guard regions after it"),
    Variable("FA_A2A_REVISION", "", "git revision for results measured outside a checkout"),
    Variable("FA_A2A_REQUIRE", "", "test tiers (compile, gpu, multigpu) whose skips become failures, comma-separated"),
)
_DEFAULTS = {v.name: v.default for v in VARIABLES}


def read(name: str) -> str:
    """The variable's text, or its default; KeyError for a name that is not in VARIABLES."""
    return os.environ.get(name) or _DEFAULTS[name]


def read_number(name: str) -> float:
    """The variable as a positive number. Raises ConfigurationError for anything else."""
    text = read(name)
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigurationError(f"{name} must be a positive number, got {text!r}; unset it for {_DEFAULTS[name]}")
    return number


def debug() -> bool:
    return read("FA_A2A_DEBUG") not in ("0", "false", "no")


def set_default(name: str, value: str) -> None:
    """Sets another library's variable unless the user has."""
    os.environ.setdefault(name, value)
