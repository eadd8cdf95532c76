"""Which rows and heads a rank holds, outside the exchange and inside it. No torch, no devices.

Outside, tokens are sharded: rank r holds `shard_sizes[r]` rows of the sequence, and all rows of replicated text beside
them. Inside, heads are: rank r computes a range of the query heads, the first ranks one more where they do not divide,
and holds the K/V heads that these need, so a K/V head may lie on several ranks.

Everything a kernel or a copy asks is a span (first row, rows) of the whole sequence or a range of heads, so that equal
and unequal shards take one way. Extents that must be the same on every rank are those of the rank that holds most:
`local_seq`, `local_heads`, `local_kv_heads`. Q and O chunks are padded to `local_seq` rows, and their owner narrows
its view; K and V are compact, so that no key has to be masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .errors import ShapeError

MAX_RANKS = 32  # one lane of the signal kernel's warp for each peer

Span = tuple[int, int]  # first row, number of rows


def even_split(count: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` shares of `count` things: the first count % parts have one more, as torch.tensor_split does."""
    return tuple(count // parts + (i < count % parts) for i in range(parts))


def split_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[range, ...]:
    """The query heads of each rank: shares that differ by one at most.

    Where several ranks share a K/V head, no share crosses from one to the next, so each rank needs exactly one."""
    if num_ranks % num_kv_heads == 0:
        sizes = even_split(num_heads // num_kv_heads, num_ranks // num_kv_heads) * num_kv_heads
    else:
        sizes = even_split(num_heads, num_ranks)
    ends = [sum(sizes[: r + 1]) for r in range(num_ranks)]
    return tuple(range(end - size, end) for size, end in zip(sizes, ends))


@dataclass(frozen=True)
class ExchangeShape:
    """Shape of one call, the same on every rank. `seq_len` and `num_heads` count the whole sequence and all heads.

    num_kv_heads: 0 for as many as query heads. shard_sizes: rows of each rank, replicated text not counted; None for
    equal shards. text_rows: rows of text that every rank holds; it comes before the other rows if positive, after them
    if negative, locally and in the whole sequence, and `seq_len` counts it once. Raises ShapeError.
    """

    batch: int
    seq_len: int
    num_heads: int
    head_dim: int
    num_ranks: int
    itemsize: int
    num_kv_heads: int = 0
    shard_sizes: tuple[int, ...] | None = None
    text_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "num_heads", "head_dim", "num_ranks", "itemsize"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_ranks > MAX_RANKS:
            raise ShapeError(f"a group has at most {MAX_RANKS} ranks, got {self.num_ranks}")
        self._check_rows()
        if self.num_heads < self.num_ranks:
            raise ShapeError(
                f"every rank takes at least one head: {self.num_heads} heads over {self.num_ranks} ranks; "
                "use a group of fewer ranks"
            )
        if self.num_heads % self.kv_heads:
            raise ShapeError(
                f"the query heads must be a multiple of the key heads, got {self.num_heads} and {self.kv_heads}"
            )

    def _check_rows(self) -> None:
        if self.shard_sizes is None and self.shared_rows % self.num_ranks:
            raise ShapeError(
                f"shards are equal unless shard_sizes says otherwise: {self.shared_rows} tokens over {self.num_ranks} "
                f"ranks; pass shard_sizes={list(even_split(self.shared_rows, self.num_ranks))} (say) on every rank"
            )
        if len(self.sizes) != self.num_ranks or min(self.sizes) < 1 or sum(self.sizes) != self.shared_rows:
            raise ShapeError(
                f"shard_sizes must be {self.num_ranks} positive numbers that sum to {self.shared_rows} tokens, got "
                f"{list(self.sizes)}; every rank must hold at least one token"
            )

    # -- outside the exchange: rows ----------------------------------------------------------------------------------

    @property
    def shared_rows(self) -> int:
        """Rows that are sharded: all but replicated text."""
        return self.seq_len - abs(self.text_rows)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        equal = (self.shared_rows // self.num_ranks,) * self.num_ranks
        return equal if self.shard_sizes is None else self.shard_sizes

    @cached_property
    def shards(self) -> tuple[Span, ...]:
        """Where each rank's own rows lie in the whole sequence."""
        text_before = max(self.text_rows, 0)
        return tuple((text_before + sum(self.sizes[:r]), size) for r, size in enumerate(self.sizes))

    @property
    def text(self) -> Span | None:
        """Where replicated text lies in the whole sequence."""
        if not self.text_rows:
            return None
        return (0, self.text_rows) if self.text_rows > 0 else (self.shared_rows, -self.text_rows)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The parts of the whole sequence that `rank` holds, in the order of its rows."""
        own, text = self.shards[rank], self.text
        if text is None:
            return (own,)
        return (text, own) if self.text_rows > 0 else (own, text)

    def own_rows(self, rank: int) -> slice:
        """Its shard among the rows that `rank` holds: all of them but replicated text."""
        first = max(self.text_rows, 0)
        return slice(first, first + self.sizes[rank])

    def text_place(self, rank: int) -> slice:
        """Replicated text among the rows that `rank` holds; empty without."""
        first = 0 if self.text_rows >= 0 else self.sizes[rank]
        return slice(first, first + abs(self.text_rows))

    def rows(self, rank: int) -> int:
        return self.sizes[rank] + abs(self.text_rows)

    @property
    def equal_shards(self) -> bool:
        return self.shard_sizes is None and not self.text_rows

    @cached_property
    def local_seq(self) -> int:
        """Rows of the rank that holds most: the extent of a chunk of Q and O."""
        return max(self.sizes) + abs(self.text_rows)

    # -- inside the exchange: heads ----------------------------------------------------------------------------------

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.kv_heads

    @cached_property
    def head_ranges(self) -> tuple[range, ...]:
        """The query heads that each rank computes."""
        return split_heads(self.num_heads, self.kv_heads, self.num_ranks)

    @cached_property
    def kv_ranges(self) -> tuple[range, ...]:
        """The K/V heads that each rank holds."""
        group = self.heads_per_kv
        return tuple(range(heads[0] // group, heads[-1] // group + 1) for heads in self.head_ranges)

    def kv_runs(self, rank: int) -> tuple[tuple[slice, slice], ...]:
        """(query heads, K/V head) among those of `rank`: the query heads that share one K/V head, run by run."""
        heads, kv, group = self.head_ranges[rank], self.kv_ranges[rank], self.heads_per_kv
        runs = []
        for at, shared in enumerate(kv):
            first, end = max(heads[0], shared * group), min(heads[-1] + 1, (shared + 1) * group)
            runs.append((slice(first - heads[0], end - heads[0]), slice(at, at + 1)))
        return tuple(runs)

    @cached_property
    def equal_heads(self) -> bool:
        """Every rank holds as many query heads and as many K/V heads of its own."""
        return self.num_heads % self.num_ranks == 0 and self.kv_heads % self.num_ranks == 0

    @property
    def is_equal(self) -> bool:
        """Every rank sends as many rows and as many heads of q, k and v to every rank."""
        return self.equal_shards and self.num_heads % self.num_ranks == 0 and self.kv_heads == self.num_heads

    @cached_property
    def local_heads(self) -> int:
        """Query heads of the rank that has most."""
        return max(map(len, self.head_ranges))

    @cached_property
    def local_kv_heads(self) -> int:
        """K/V heads of the rank that has most."""
        return max(map(len, self.kv_ranges))

    # -- bytes -------------------------------------------------------------------------------------------------------

    @property
    def tensor_bytes(self) -> int:
        """Bytes of Q or of O on the rank that needs most; with equal shards, of either on any rank."""
        q_rows = self.num_ranks * self.local_seq * self.local_heads
        return self.batch * max(q_rows, self.local_seq * self.num_heads) * self.head_dim * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of K or of V on the rank that needs most."""
        return self.batch * self.seq_len * self.local_kv_heads * self.head_dim * self.itemsize

    @property
    def lse_bytes(self) -> int:
        return self.batch * self.num_heads * self.local_seq * 4
