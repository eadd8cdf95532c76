"""What a call may look like, and which path it takes. The README's table is made from these rows, and so are the tests
of test_support.py in tests/multiprocess and tests/multigpu: each runs every row's `call` and asks which path
it took. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Support:
    """call: a Situation of tests/situations.py. cpu, gpu: the exchange that "auto" takes on CPU processes, and with
    kernel fa4 on GPUs of compute capability 9.0."""

    what: str
    how: str  # what the caller passes
    call: dict[str, Any] = field(repr=False)
    cpu: str = "fused"
    gpu: str = "fused"


UNEVEN: dict[str, Any] = {"seq": 331, "sizes": "split"}
SUPPORT = (
    Support("equal shards, any batch, head_dim 64, 128", "", {"seq": 384, "batch": 2, "heads": 12}),
    Support("head_dim 96, 256 (stock kernel, no pacing)", "", {"seq": 384, "heads": 12, "dim": 96}),
    Support("sequence not divisible by P", "`shard_sizes`", {**UNEVEN, "heads": 12, "batch": 2}),
    Support("heads not divisible by P", "", {"seq": 384, "heads": 13}),
    Support("fewer K/V heads, even than ranks", "", {"seq": 384, "heads": 24, "kv_heads": 6}),
    Support("padded keys", "`key_lengths`", {"seq": 384, "batch": 2, "heads": 12, "key_lengths": (300, 77)}),
    Support("text on every rank, before or after", "`replicated_text`", {**UNEVEN, "heads": 12, "text": -77}),
    Support("causal (stock kernel, no pacing)", "`causal`", {**UNEVEN, "heads": 12, "causal": True}),
    Support("cross-attention", "`whole_kv`", {"seq": 384, "heads": 12, "kv_rows": 77}, "collective", "collective"),
)
WORDS = {"fused": "fused", "collective": "local: nothing is exchanged"}
