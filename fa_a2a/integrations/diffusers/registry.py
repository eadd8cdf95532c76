"""Makes the backend known to diffusers, and undoes that.

diffusers has no public way to add a backend: its names are a closed Enum, and its registry is private. Both are
extended here and nowhere else, and only for the versions whose insides were looked at and tested with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError, UnsupportedError
from ...ops.arguments import flag_problem
from ...ops.deadlines import deadline
from ...ops.plan import check_choices
from . import backend
from .backend import NAME as NAME
from .backend import Options

TESTED_VERSIONS = ("0.42.1",)

_MEMBER = NAME.upper()


@dataclass(frozen=True)
class _Before:
    """What to put back."""

    member: Any
    active: Any
    mended: Any  # the logger that was given a method, or None


_before: _Before | None = None


def enable(kernel: str = "auto", exchange: str = "auto", copy: bool = True, timeout_s: float | None = None) -> None:
    """Makes `model.set_attention_backend("fa_a2a")` possible in this process; call it on every rank, before that.

    kernel, exchange, timeout_s: as of UlyssesAttention. copy: hand ordinary tensors to the model. With False it gets
    views of the workspace, valid until the next attention on the group: one copy less for each layer, and right only
    for models that are done with one attention's output before the next begins. Most are, but not all: StableAudio3
    subtracts one attention's output from another's, and a hook may keep one. So it is the caller's decision.
    Called again, it changes the options. Raises UnsupportedError for a diffusers that was not tested with.
    """
    global _before
    seconds = deadline(timeout_s)
    check_choices(kernel, exchange, seconds)
    if (refused := flag_problem("copy", copy)) is not None:
        raise refused
    names, registry = _diffusers()
    if _before is None and NAME in names._value2member_map_:
        raise ConfigurationError(f"diffusers has a backend named {NAME!r} already, which this library did not add")
    theirs = registry._backends
    backend.configure(Options(kernel, exchange, copy, seconds), theirs[names.NATIVE], theirs[names._NATIVE_CUDNN])
    if _before is not None:
        return
    active = registry._active_backend
    member = _add_member(names)
    registry.register(member, supports_context_parallel=True)(backend.attention)
    _before = _Before(member, active, _mend_logger())


def is_enabled() -> bool:
    return _before is not None


def disable() -> None:
    """Takes the backend out of diffusers again, and forgets its groups. Does nothing if it is not there.

    Give models another backend first (`model.reset_attention_backend()`): one that still names "fa_a2a" fails with a
    KeyError of that name at its next forward. The workspaces stay until `fa_a2a.close`.
    """
    global _before
    if _before is None:
        return
    names, registry = _diffusers()
    member, active = _before.member, _before.active
    if registry._active_backend is member:  # set_attention_backend makes its backend the default of other models, too
        registry.set_active_backend(active)
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(member, None)
    registry._supports_context_parallel.discard(NAME)
    _remove_member(names)
    if _before.mended is not None:
        del _before.mended.warning_once
    backend.forget()
    _before = None


def _diffusers() -> tuple[Any, Any]:
    """(AttentionBackendName, the registry) of a tested diffusers."""
    try:
        import diffusers
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise UnsupportedError(f"diffusers cannot be imported ({error}); pip install 'fa_a2a[diffusers]'") from error
    if diffusers.__version__ not in TESTED_VERSIONS:
        raise UnsupportedError(
            f"the backend reaches into diffusers' private registry and was tested with version "
            f"{', '.join(TESTED_VERSIONS)}; this is {diffusers.__version__}; pip install 'fa_a2a[diffusers]'"
        )
    return attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry


def _mend_logger() -> Any:
    """diffusers' hooks for context parallelism call a method that loggers have only once transformers is imported;
    without it Wan's first forward ends in an AttributeError."""
    from diffusers.hooks.context_parallel import logger

    if hasattr(logger, "warning_once"):
        return None
    logger.warning_once = functools.lru_cache(logger.warning)
    return logger


def _add_member(names: Any) -> Any:
    """Adds a member to the closed Enum; what the Enum's own machinery does for each line of a class body."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = _MEMBER, NAME
    member.__objclass__ = names
    member._sort_order_ = len(names._member_names_)
    setattr(names, _MEMBER, member)  # before it is a member: members cannot be assigned to
    names._member_names_.append(_MEMBER)
    names._member_map_[_MEMBER] = member
    names._value2member_map_[NAME] = member
    return member


def _remove_member(names: Any) -> None:
    names._member_names_.remove(_MEMBER)
    del names._member_map_[_MEMBER]
    del names._value2member_map_[NAME]
    delattr(names, _MEMBER)  # after it was one: members cannot be deleted
