"""CUDA graphs of what is measured, so that the host's part is not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm.group import Group

Captured = tuple[torch.cuda.CUDAGraph, torch.Tensor]
LAYERS_PER_GRAPH = 10  # of those that time whole layers
_AGREE_S = 300.0


def capture(call: Callable[[], torch.Tensor], calls: int) -> Captured:
    """A graph of so many calls and its last output. The call has run before. Thread-local: NCCL's watchdog queries
    events then. Raises whatever a library's calls raise in a capture."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                out = call()
    except Exception:
        torch.cuda.set_stream(stream)  # the context leaves its own behind where the capture cannot end
        raise
    return graph, out


def capture_everywhere(
    call: Callable[[], torch.Tensor], calls: int, topic: str, agree: Callable[[str, str], str]
) -> tuple[Captured | None, str]:
    """What `capture` gives; None, and the first rank's reason, where a rank cannot. agree: as below, of the ranks that
    measure. Collective."""
    captured, reason = None, ""
    try:
        captured = capture(call, calls)
    except Exception as error:  # whatever a library's calls raise in a capture
        reason = first_line(error.__context__ or error)  # the end of the capture raises another error behind it
    if reason := agree(topic, reason):
        return None, reason
    return captured, ""


def agree(group: Group, topic: str, reason: str) -> str:
    """Why one rank or another cannot take part, the first reason; "" where all can. Collective."""
    return next(filter(None, group.exchange(topic, reason, _AGREE_S)), "")


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
