"""fa_a2a: attention for sequence-parallel diffusion transformers whose all-to-all hides behind the attention itself.

Names are imported when first used; importing this package costs torch only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import errors as errors

__version__ = "0.1.0"

_HOME = {
    "UlyssesAttention": "nn",
    "HeadShards": "ops.functional",
    "NormRope": "ops.norm_rope",
    "scatter_heads": "ops.functional",
    "attention_gather": "ops.functional",
    "initialize": "lifecycle",
    "close": "lifecycle",
    "memory_bytes": "lifecycle",
}
__all__ = [
    "HeadShards",
    "NormRope",
    "UlyssesAttention",
    "__version__",
    "attention_gather",
    "close",
    "errors",
    "initialize",
    "memory_bytes",
    "scatter_heads",
]

if TYPE_CHECKING:
    from .lifecycle import close, initialize, memory_bytes
    from .nn import UlyssesAttention
    from .ops.functional import HeadShards, attention_gather, scatter_heads
    from .ops.norm_rope import NormRope


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
