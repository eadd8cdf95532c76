"""What a call may look like, and which path it takes. The README's list is made from these rows, and so are the tests
of test_support.py in tests/multiprocess and test_support_on_gpus.py in tests/multigpu: each runs every row's `call` and
asks which path it took. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FUSED, STOCK, LOCAL = "fused", "fused, stores not paced", "on each rank alone"


@dataclass(frozen=True)
class Support:
    """call: a Situation of tests/situations.py. gpu: the path of kernel fa4 on GPUs of compute capability 9.0, unless
    "auto" expects more of a collective for the shape; on CPU processes it is the same, but nothing is paced."""

    what: str
    call: dict[str, Any] = field(repr=False)
    gpu: str = FUSED

    @property
    def exchange(self) -> str:
        return "collective" if self.gpu == LOCAL else "fused"


# What ops/overlap_schedule.py's `problem` asks for.
OVERLAPPED = (
    "batch 1, head_dim 128, equal shards and heads, as many K/V heads, all keys, no `norm_rope`, the default group"
)
UNEVEN: dict[str, Any] = {"seq": 331, "sizes": "split"}
SUPPORT = (
    Support("any batch, head_dim 64 and 128", {"seq": 384, "batch": 2, "heads": 12}),
    Support("S not divisible by P (`shard_sizes`)", {**UNEVEN, "heads": 12, "batch": 2}),
    Support("H not divisible by P", {"seq": 384, "heads": 13}),
    Support("fewer K/V heads, even than ranks", {"seq": 384, "heads": 24, "kv_heads": 6}),
    Support("padded keys (`key_lengths`)", {"seq": 384, "batch": 2, "heads": 12, "key_lengths": (300, 77)}),
    Support("text that all ranks hold, first or last (`replicated_text`)", {**UNEVEN, "heads": 12, "text": -77}),
    Support("causal (`causal`)", {**UNEVEN, "heads": 12, "causal": True}, STOCK),
    Support("head_dim 96", {"seq": 384, "heads": 12, "dim": 96}, STOCK),
    Support("head_dim 256", {"seq": 384, "heads": 6, "dim": 256}, STOCK),
    Support("cross-attention with whole K and V (`whole_kv`)", {"seq": 384, "heads": 12, "kv_rows": 77}, LOCAL),
)
