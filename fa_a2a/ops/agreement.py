"""Agreement of the ranks before a call that they have not made yet, so that bad input is one clear error on every rank.

Whatever way a call takes, fused, collective or masked, its ranks meet under one topic: a rank that takes another way
than its peers is told so, too.
"""

from __future__ import annotations

from collections.abc import Callable

from ..comm.group import Group, by_rank
from ..errors import FaA2AError, PeerMismatchError, PeerTimeoutError
from . import differences

Report = dict[str, str | None]


def report_of(error: FaA2AError) -> Report:
    """What a rank tells that cannot make the call."""
    return {"request": None, "error": f"{type(error).__name__}: {error}"}


def agree(
    group: Group, mine: Report, error: FaA2AError | None, departs: Callable[[], str], timeout_s: float
) -> list[Report]:
    """Every rank's report. mine: "request" as JSON, "error", and what else the others are to know; error: this rank's
    own, which its report tells; departs: how the call differs from those the group knows.

    Raises `error` where every rank has one of its kind, PeerMismatchError where ranks differ, PeerTimeoutError where
    one does not come.
    """

    def watch(has_come: Callable[[int], bool]) -> None:
        """Peers that have begun a call this rank knows nothing of are not coming to agree: end theirs, too. One that
        has come was through with this exchange before its call."""
        ahead = [] if group.workspace is None else group.workspace.peers_ahead()
        if group.workspace is None or not (ahead := [r for r in ahead if not has_come(r)]):
            return
        group.workspace.abort()
        what = departs() if error is None else str(error)
        message = f"rank {group.rank} departs from a call that ranks {ahead} have begun: {what}"
        group.poisoned = message
        raise PeerMismatchError(
            f"{message}; shapes, dtypes and options must be the same on every rank; call fa_a2a.close(group) on every "
            "rank, then go on"
        )

    try:
        reports = group.exchange("agreement on the arguments", mine, timeout_s, watch)
    except PeerTimeoutError as late:
        raise (late if error is None else error) from late
    errors = [report["error"] for report in reports]
    if error is not None and all(errors) and len({str(text).partition(":")[0] for text in errors}) == 1:
        raise error  # texts may differ, in a device's number say
    if told := by_rank(errors):
        raise PeerMismatchError(told)
    differences.compare(reports)
    return reports
