"""CUDA graphs of what is measured, so that the host's part is not."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(call: Callable[[], torch.Tensor], calls: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
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


def first_line(error: BaseException) -> str:
    """Of a failed capture ask error.__context__ first: the end of the capture raises another error behind it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
