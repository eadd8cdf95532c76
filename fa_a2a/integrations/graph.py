"""A whole forward as one CUDA graph: one launch by the host where there was one for every step of every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigurationError, ShapeError
from .host_reads import Watch

WARM_UPS = 2  # the first call compiles, agrees and makes room, which a capture cannot


class GraphedForward:
    """Captures `model(*args, **kwargs)` when it is made; calls copy new inputs in and replay.

    model: any callable whose work is on the current CUDA device, its parameters and shapes fixed: what differs from
    call to call must be a tensor among the arguments, on the device, of the shape it was captured with. Other arguments
    must be equal to the captured ones. All ranks of a parallel model make it together, as they make every call.
    A mask whose key lengths the model's attention read on the host is part of the graph: its values must stay.
    Returns what the model returned: the same tensors each time, overwritten by the next call.
    Raises ConfigurationError on a CPU device and for another mask, ShapeError for inputs that the graph was not
    captured with.
    """

    def __init__(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not any(isinstance(x, torch.Tensor) and x.is_cuda for x in (*args, *kwargs.values())):
            raise ConfigurationError(
                "a CUDA graph needs a tensor on a CUDA device among the inputs; move model and inputs"
            )
        self._args = tuple(_copy(x) for x in args)
        self._kwargs = {name: _copy(x) for name, x in kwargs.items()}
        self.graph, self._watch = torch.cuda.CUDAGraph(), Watch()
        with torch.inference_mode(), self._watch.open():
            side, stream = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    waited(model(*self._args, **self._kwargs))
            stream.wait_stream(side)
            torch.cuda.synchronize()
            try:
                # thread-local: NCCL's watchdog queries events meanwhile
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.output = waited(model(*self._args, **self._kwargs))
            except Exception:
                torch.cuda.set_stream(stream)  # the context leaves its own behind where the capture cannot end
                raise
        self._watch.check_among([*self._args, *self._kwargs.values()])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != len(self._args) or kwargs.keys() != self._kwargs.keys():
            raise ShapeError(
                f"the graph was captured with {len(self._args)} arguments and {sorted(self._kwargs)}, "
                f"got {len(args)} and {sorted(kwargs)}"
            )
        for name, mine, given in (
            *((f"argument {i}", *pair) for i, pair in enumerate(zip(self._args, args))),
            *((name, mine, kwargs[name]) for name, mine in self._kwargs.items()),
        ):
            _take(name, mine, given, self._watch)
        self.replay()
        return self.output

    def replay(self) -> None:
        """The forward on the inputs as they are."""
        self.graph.replay()


def waited(output: Any) -> Any:
    """The same, with every tensor complete in stream order: what a collective at a model's end returns waits only when
    it is used, and a capture cannot end before."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(AsyncCollectiveTensor, lambda x: x.wait(), output)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _take(name: str, mine: Any, given: Any, watch: Watch) -> None:
    if isinstance(mine, torch.Tensor) and isinstance(given, torch.Tensor):
        if (mine.shape, mine.dtype) != (given.shape, given.dtype):
            raise ShapeError(
                f"{name} was captured as {tuple(mine.shape)} {mine.dtype}, got {tuple(given.shape)} {given.dtype}; "
                "capture another graph for it"
            )
        if watch.covers(mine):
            watch.check_same(name, mine, given)
        else:
            mine.copy_(given, non_blocking=True)
    elif isinstance(mine, torch.Tensor) or isinstance(given, torch.Tensor) or mine != given:
        raise ShapeError(f"{name} was captured as {mine!r}, got {given!r}; only tensors can change from call to call")
