"""Environment variables: every one of ours is read here (fa4_a2a.cache, which imports nothing of this package, reads
FA_A2A_CACHE_DIR itself). The README's table is made from VARIABLES."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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
    Variable(
        "FA_A2A_SHARE_GPU", "0", "1: ranks may share a GPU, taking turns on it; for tests on fewer GPUs than ranks"
    ),
    Variable("FA_A2A_REVISION", "", "git revision that results name; the checkout's by default"),
    Variable("FA_A2A_REQUIRE", "", "test tiers (compile, gpu, multigpu) whose skips become failures, comma-separated"),
)
TIERS = ("compile", "gpu", "multigpu")
_DEFAULTS = {v.name: v.default for v in VARIABLES}
_NUMBERS = ("FA_A2A_TIMEOUT_S", "FA_A2A_COMPILE_TIMEOUT_S", "FA_A2A_ARENA_MIB")
MOST = 1e9  # seconds: 32 years; a kernel counts them in nanoseconds, 64 bits of them
_SWITCHES = ("FA_A2A_DEBUG", "FA_A2A_SHARE_GPU")
_OFF, _ON = ("0", "false", "no"), ("1", "true", "yes")


def read(name: str) -> str:
    """The variable's text, or its default; KeyError for a name that is not in VARIABLES."""
    return os.environ.get(name) or _DEFAULTS[name]


def read_number(name: str) -> float:
    """The variable as a positive number, at most MOST. Raises ConfigurationError for anything else."""
    text = read(name)
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST:
        raise ConfigurationError(
            f"{name} must be a positive number, at most {MOST:g}, got {text!r}; unset it for {_DEFAULTS[name]}"
        )
    return number


def default_number(name: str) -> float:
    return float(_DEFAULTS[name])


def debug() -> bool:
    return read("FA_A2A_DEBUG").lower() not in _OFF


def share_gpu() -> bool:
    return read("FA_A2A_SHARE_GPU").lower() not in _OFF


def required_tiers() -> list[str]:
    """Test tiers that FA_A2A_REQUIRE names. Raises ConfigurationError for one that there is not."""
    tiers = [tier for tier in read("FA_A2A_REQUIRE").split(",") if tier]
    if unknown := [tier for tier in tiers if tier not in TIERS]:
        raise ConfigurationError(f"FA_A2A_REQUIRE names tiers among {', '.join(TIERS)}, got {unknown[0]!r}")
    return tiers


def check() -> None:
    """Raises ConfigurationError for a variable that is not the number it must be: before ranks start, not in each."""
    for name in _NUMBERS:
        read_number(name)


def problem(name: str) -> str | None:
    """What is wrong with the variable's value, or None."""
    try:
        if name in _NUMBERS:
            read_number(name)
        elif name == "FA_A2A_REQUIRE":
            required_tiers()
    except ConfigurationError as error:
        return str(error)
    if name in _SWITCHES and read(name).lower() not in _OFF + _ON:
        return f"{name} must be 0 or 1, got {read(name)!r}, which counts as 1"
    return None


def unknown() -> list[str]:
    """Variables of the environment that look like ours and are not."""
    return sorted(name for name in os.environ if name.startswith("FA_A2A_") and name not in _DEFAULTS)


def foreign(name: str) -> str | None:
    """Another program's variable, as CUDA_HOME; None where it is unset or empty."""
    return os.environ.get(name) or None


def cache_dir() -> Path:
    """Folder of compiled kernels; fa4_a2a.cache finds the same."""
    chosen = os.environ.get("FA_A2A_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "fa_a2a"


def set_default(name: str, value: str) -> None:
    """Sets another library's variable unless the user has."""
    os.environ.setdefault(name, value)
