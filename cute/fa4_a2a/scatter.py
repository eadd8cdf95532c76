"""The exchange before attention, sender's side, as one kernel: each head slice of q, k, v goes straight into its
owner's Q, K and V, in the layout attention reads, and the kernel's end publishes `arrived` (signal.py).

    q, k, v       (B, s, H, D) here      heads p*h .. (p+1)*h belong to rank p; h = H/P, S = s*P
    Q of rank p   (B, S, h, D) there     my rows from chunk_at[p]*s on
    K, V of p     (B, S, h, D) there     my rows from rank*s on

Two data paths: `st` is 16-byte loads and stores, and can apply RMS-norm and rotary embedding to q and k on the way;
`bulk` goes through shared memory by bulk copies, and leaves the threads idle. Why the publication is safe stands in
scatter_kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from .cache import load_or_compile
from .checks import DTYPES, check_dtype, check_head_dim
from .signal import Flags

if TYPE_CHECKING:
    import torch

PATHS = ("st", "bulk")
PIECE_BYTES = 16
WARP = 32
MAX_RINGS_BYTES = 216 * 1024  # of the 227 KiB of shared memory that a CTA may have: the barriers need room too
OPEN_CALL = Flags.ADVANCE | Flags.PUBLISH | Flags.WAIT


class Counter(IntEnum):
    """u64 words in this GPU's memory, for one plan. Zero between launches: the last CTA to finish resets them."""

    TICKET = 0  # tiles handed out, besides each warp's first
    ARRIVALS = 1  # CTAs that have finished


class NormRope(NamedTuple):
    """What happens to q and k before they are stored; part of the compiled kernel.

    norm: RMS-norm over head_dim, then weights (D,) of weight_dtype. rope: "" for none, "interleaved" (elements 2i and
    2i + 1 turn together: Flux, Wan) or "halves" (i and i + D/2). cos and sin are (s, D) of table_dtype, one entry an
    element; with pairs (s, D/2), one entry a pair.
    """

    norm: bool = True
    rope: str = "interleaved"
    pairs: bool = False
    weight_dtype: str = "bfloat16"
    table_dtype: str = "float32"


def load_scatter(
    head_dim: int,
    dtype: str,
    arch: str,
    path: str = "st",
    norm_rope: NormRope | None = None,
    threads: int = 256,
    unroll: int = 4,
    stages: int = 3,
    stage_bytes: int = 4096,
) -> Callable[..., None]:
    """A callable (q, k, v, destinations, peer_blocks, counters, q_weight, k_weight, cos, sin, eps, rank, num_ranks,
    num_ctas, own_last, flags, fingerprint, deadline_ns, record) on torch's current stream; ScatterPlan fills it in.

    q, k, v: (B, s, H, D), D contiguous, other strides in multiples of 8 elements, addresses of 16 bytes. destinations:
    int64 CUDA tensor [3 * P], where my first row goes in each rank's Q, then K, then V, own included. counters: int64
    CUDA tensor of len(Counter), zeroed once. q_weight to sin: as norm_rope says, None for what it leaves out. num_ctas:
    the grid. own_last: 1 stores the own slice behind all others, 0 among them. The rest as for signal.load_signal.

    threads: of a CTA. unroll (st): 16-byte loads that each thread has in flight. stages, stage_bytes (bulk): each
    warp's ring in shared memory.
    """
    check_dtype(dtype)
    check_head_dim(head_dim)
    if path not in PATHS:
        raise ValueError(f"path is one of {', '.join(PATHS)}, not {path!r}")
    if threads % WARP or not WARP <= threads <= 1024:
        raise ValueError(f"threads is a multiple of {WARP} up to 1024, not {threads}")
    key: dict[str, Any] = {"arch": arch, "head_dim": head_dim, "dtype": dtype, "path": path, "threads": threads}
    if path == "st":
        if unroll < 1:
            raise ValueError(f"unroll is at least 1, not {unroll}")
        if norm_rope is not None:
            _check_norm_rope(norm_rope, head_dim)
        key |= {"unroll": unroll, "norm_rope": None if norm_rope is None else norm_rope._asdict()}
    else:
        if norm_rope is not None:
            raise ValueError("norm_rope needs path 'st': on path 'bulk' the data never passes through registers")
        if not 2 <= stages <= WARP or stage_bytes < 2 * head_dim:
            raise ValueError(f"a ring has 2 to {WARP} stages of a head or more ({2 * head_dim} bytes)")
        if stages * stage_bytes * threads // WARP > MAX_RINGS_BYTES:
            raise ValueError(f"{threads // WARP} rings of {stages} stages of {stage_bytes} bytes do not fit an SM")
        key |= {"stages": stages, "stage_bytes": stage_bytes}

    def build() -> Any:
        from .scatter_compile import compile_scatter

        return compile_scatter(head_dim, dtype, arch, path, norm_rope, threads, unroll, stages, stage_bytes)

    return load_or_compile(f"scatter-{path}-{arch}-d{head_dim}-{dtype}", key, build)


def _check_norm_rope(options: NormRope, head_dim: int) -> None:
    lanes = head_dim // 8
    if lanes > WARP or lanes & (lanes - 1) or lanes < 2:
        raise ValueError(f"norm_rope needs a head_dim of 16, 32, 64, 128 or 256, not {head_dim}")
    if options.rope not in ("", "interleaved", "halves"):
        raise ValueError(f"rope is '', 'interleaved' or 'halves', not {options.rope!r}")
    if not options.norm and not options.rope:
        raise ValueError("norm_rope asks for neither norm nor rope; leave it out")
    for name in (options.weight_dtype, options.table_dtype):
        if name not in (*DTYPES, "float32"):
            raise ValueError(f"weights and tables are bfloat16, float16 or float32, not {name!r}")


class ScatterPlan:
    """One rank's exchange with everything prepared that does not change from call to call: a call is one launch.

    Make it outside of CUDA graph capture (it copies tables to the device); a graph that captured a call needs the plan
    alive. Its calls must follow each other in stream order.
    """

    def __init__(
        self,
        kernel: Callable[..., None],
        shape: tuple[int, int, int, int],
        rank: int,
        addresses: Sequence[Sequence[int]],
        chunk_at: Sequence[int],
        peer_blocks: torch.Tensor,
        record: int,
        num_ctas: int,
        own_last: bool = False,
        itemsize: int = 2,
    ) -> None:
        """kernel: of load_scatter. shape: (B, s, H, D) of q, k and v. addresses: of every rank's Q, K and V buffers as
        mapped here, [3][P]. chunk_at: place of my chunk among each rank's queries. peer_blocks, record: as for
        signal.load_signal."""
        import torch

        batch, rows, heads, head_dim = shape
        ranks = len(chunk_at)
        if heads % ranks:
            raise ValueError(f"{heads} heads do not divide over {ranks} ranks")
        row_bytes = heads // ranks * head_dim * itemsize
        if rows * row_bytes // PIECE_BYTES >= 2**31 - 2**20 or rows * batch * 3 * heads >= 2**31 - 2**20:
            raise ValueError(f"{shape} is too large for the kernel's 32-bit indices")
        first_rows = (chunk_at, [rank] * ranks, [rank] * ranks)
        table = [
            at + first * rows * row_bytes
            for buffers, firsts in zip(addresses, first_rows)
            for at, first in zip(buffers, firsts)
        ]
        if len(table) != 3 * ranks or any(at % PIECE_BYTES for at in table):
            raise ValueError(f"addresses are three times {ranks} multiples of {PIECE_BYTES}, got {addresses}")
        self.shape = torch.Size(shape)
        self._kernel = kernel
        device = peer_blocks.device
        self._before = (
            torch.tensor(table, dtype=torch.int64, device=device),
            peer_blocks,
            torch.zeros(len(Counter), dtype=torch.int64, device=device),
        )
        self._after = (rank, ranks, num_ctas, int(own_last))
        self._record = record

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        fingerprint: int = 0,
        flags: int = OPEN_CALL,
        deadline_ns: int = 30 * 10**9,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> None:
        if q.shape != self.shape:  # k and v are compared with q by the launch
            raise ValueError(f"the plan is for q, k, v of shape {tuple(self.shape)}, got {tuple(q.shape)}")
        extras = (q_weight, k_weight, cos, sin, eps)
        self._kernel(q, k, v, *self._before, *extras, *self._after, int(flags), fingerprint, deadline_ns, self._record)
