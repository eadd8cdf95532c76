"""The exchange before attention where ranks differ: unequal shards, unequal heads, fewer K/V heads than query heads.

As scatter.py's path `st`, but where a slice comes from and goes to is looked up for each tensor and peer:

    q, k, v       (B, s, H, D), (B, s, H_kv, D) here; s rows of this rank, which no other rank need have
    Q, K, V of p  any buffer there in which my rows of p's heads are contiguous; two peers may need the same K/V heads

The kernel of equal shards stays as it is: it knows the sizes of all slices from the shape, and divides by constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .cache import load_or_compile
from .checks import check_dtype, check_head_dim
from .scatter import PIECE_BYTES, Counter, ScatterPlan

if TYPE_CHECKING:
    import torch

THREADS, UNROLL = 256, 4  # as scatter.load_scatter's defaults


class Slice(NamedTuple):
    """What one peer gets of q, k or v. The table on the device holds all addresses, then all batch_bytes, and so on."""

    address: int  # of my first row of the peer's heads, as mapped here
    batch_bytes: int  # from one batch entry to the next in the peer's buffer
    first_head: int
    heads: int


def load_unequal(head_dim: int, dtype: str, arch: str) -> Callable[..., None]:
    """As scatter.load_scatter; destinations: int64 CUDA tensor [4, 3, P], the fields of Slice for each tensor and rank.
    No peer's slice of any tensor has more than H // P + 1 heads."""
    check_dtype(dtype)
    check_head_dim(head_dim)
    key: dict[str, Any] = {"arch": arch, "head_dim": head_dim, "dtype": dtype, "path": "unequal"}
    key |= {"threads": THREADS, "unroll": UNROLL}

    def build() -> Any:
        from .scatter_unequal_kernel import compile_unequal

        return compile_unequal(head_dim, dtype, arch, THREADS, UNROLL)

    return load_or_compile(f"scatter-unequal-{arch}-d{head_dim}-{dtype}", key, build)


class UnequalPlan(ScatterPlan):
    """One rank's exchange, prepared; see ScatterPlan."""

    def __init__(
        self,
        kernel: Callable[..., None],
        shape: tuple[int, int, int, int],
        rank: int,
        slices: Sequence[Sequence[Slice]],
        peer_blocks: torch.Tensor,
        record: int,
        num_ctas: int,
        itemsize: int = 2,
    ) -> None:
        """kernel: of load_unequal. shape: (B, s, H, D) of q. slices: of q, k and v, [3][P]. The rest as for
        ScatterPlan."""
        import torch

        batch, rows, heads, head_dim = shape
        ranks = len(slices[0])
        most = heads // ranks + 1
        if [len(part) for part in slices] != [ranks] * 3 or max(x.heads for part in slices for x in part) > most:
            raise ValueError(f"slices are three times {ranks}, of at most {most} heads each; got {slices}")
        if any(x.address % PIECE_BYTES or x.batch_bytes % PIECE_BYTES for part in slices for x in part):
            raise ValueError(f"addresses and batch_bytes are multiples of {PIECE_BYTES}, got {slices}")
        pieces = rows * most * head_dim * itemsize // PIECE_BYTES
        if pieces >= 2**31 - 2**20 or rows * batch * 3 * (heads + ranks) >= 2**31 - 2**20:
            raise ValueError(f"{shape} is too large for the kernel's 32-bit indices")
        table = [[[x[field] for x in part] for part in slices] for field in range(len(Slice._fields))]
        device = peer_blocks.device
        self.shape = torch.Size(shape)
        self._kernel, self._record = kernel, record
        self._before = (
            torch.tensor(table, dtype=torch.int64, device=device).flatten(),
            peer_blocks,
            torch.zeros(len(Counter), dtype=torch.int64, device=device),
        )
        self._after = (rank, ranks, num_ctas, 0)
