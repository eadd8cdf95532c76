"""The deadline of a call as a caller passes it, and options that only this rank has to do with."""

from __future__ import annotations

from .. import config
from ..errors import ConfigurationError, FaA2AError
from .arguments import flag_problem
from .request import check_deadline, is_deadline


def deadline(timeout_s: float | None) -> float:
    """The deadline in seconds; what is none comes back as it is, for `check_deadline` to refuse."""
    if timeout_s is None:
        return config.read_number("FA_A2A_TIMEOUT_S")
    return float(timeout_s) if is_deadline(timeout_s) else timeout_s


def own_options(timeout_s: float | None, copy: object = False) -> tuple[float, FaA2AError | None]:
    """A deadline to work with, and what is wrong with options that are one rank's own. Its peers wait for what it
    does and not for what it wants, so it does its part before it raises."""
    seconds, refused = deadline(timeout_s), flag_problem("copy", copy)
    try:
        check_deadline(seconds)
    except ConfigurationError as error:
        return deadline(None), refused or error
    return seconds, refused
