"""Attention processors that call torch's SDPA themselves, sent through diffusers' dispatcher."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Redirected:
    """What a redirected processor has beside its own class: the attributes that diffusers sets on its processors."""

    _attention_backend: Any = None
    _parallel_config: Any = None


def redirected(processor: Any) -> Any:
    """A copy of a diffusers attention processor whose SDPA call goes to the dispatcher, with backend and parallel
    config. The processor runs as it is; only that one function is another inside it.

    A subclass with the signature of the original: diffusers reads it to choose what it passes on.
    """
    kind = type(processor)
    if issubclass(kind, Redirected):
        return processor

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _ToDispatcher(self._attention_backend, self._parallel_config):
            return kind.__call__(self, *args, **kwargs)

    made = copy.copy(processor)
    made.__class__ = type(f"Redirected{kind.__name__}", (Redirected, kind), {"__call__": call})
    return made


class _ToDispatcher(TorchFunctionMode):
    def __init__(self, backend: Any, parallel_config: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backend, self.parallel_config = backend, parallel_config

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._dispatch(**dict(zip(_NAMES, args)), **(kwargs or {}))

    def _dispatch(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """SDPA's (batch, heads, seq, head_dim) in and out; the dispatcher has heads and seq the other way round. A mode
        is off while it handles a call, so the dispatcher's own SDPA does not come back here."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        out: torch.Tensor = dispatch_attention_fn(
            *(x.transpose(1, 2) for x in (query, key, value)),
            **options,
            backend=self.backend,
            parallel_config=self.parallel_config,
        )
        return out.transpose(1, 2)
