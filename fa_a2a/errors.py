"""Errors of the library. Each message says the rule, what was got, and the way out."""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "FaA2AError",
    "GroupError",
    "PeerError",
    "PeerFailedError",
    "PeerMismatchError",
    "PeerTimeoutError",
    "ProfileError",
    "ShapeError",
    "UnsupportedError",
    "WorkspaceError",
]


class FaA2AError(Exception):
    """Base of every error raised on purpose by this library."""


class ShapeError(FaA2AError, ValueError):
    """A tensor's shape, dtype, device or layout breaks a rule."""


class UnsupportedError(FaA2AError, NotImplementedError):
    """A valid request that this version, this machine or this kernel does not carry out."""


class ConfigurationError(FaA2AError, ValueError):
    """An option, an environment variable or a combination of them is wrong."""


class ProfileError(FaA2AError, ValueError):
    """A platform profile is malformed, or belongs to another device or number of ranks."""


class GroupError(FaA2AError, RuntimeError):
    """The process group is missing, not initialised, or cannot be used."""


class WorkspaceError(FaA2AError, RuntimeError):
    """The workspace is closed, poisoned by an earlier error, or its calls came out of order."""


class PeerError(FaA2AError, RuntimeError):
    """Another rank of the group failed, or disagrees with this one."""


class PeerFailedError(PeerError):
    """A rank of the group raised an error, or was interrupted, in the middle of a call."""


class PeerMismatchError(PeerError):
    """The ranks of the group called with different arguments."""


class PeerTimeoutError(PeerError, TimeoutError):
    """A rank of the group did not arrive before the deadline."""
