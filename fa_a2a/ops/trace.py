"""NVTX ranges around the steps of a call, for Nsight Systems; nothing on CPUs."""

from __future__ import annotations

from types import TracebackType

import torch


class step:
    """Range `fa_a2a.<name>` on the host's timeline while the step is enqueued. A class: a generator costs more time
    than the range itself."""

    __slots__ = ("_name",)

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = f"fa_a2a.{name}" if device.type == "cuda" else ""

    def __enter__(self) -> None:
        if self._name:
            torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._name:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
