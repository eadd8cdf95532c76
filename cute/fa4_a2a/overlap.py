"""The whole layer as one kernel: the persistent sm_90 forward that also sends this rank's q, k, v to their owners, and
takes each peer's as they come, while it computes on what is here already.

    q, k, v       (1, s, H, D)  this rank's tokens of all heads
    Q of the rank (S, h, D)     chunk c at rows c*s: the queries of the rank c places on. Chunk 0 is read from q itself
    K, V          (S, h, D)     chunk c at rows S - (c+1)*s. The kernel walks keys from the last row down, so it begins
                                with the own ones, read from k and v themselves, and crosses into the next rank's chunk

What each rank has to send to each other one is cut into parts: part g < kv_parts is K and V of head group g, part
kv_parts is Q. Two idle warps of each CTA store them (overlap_send.py), in the order of `send_order`; the load warp
waits for a part where it crosses into it (overlap_wait.py). Only a key tile that holds rows of the own chunk and of the
next one is read from the workspace whole, so the own rows in it are copied there: part 0 of the rank to itself.

The keys of a query come in another order than in the stock kernel on keys in global order: the result is the same up to
rounding, and bitwise that of the stock kernel on keys in this order, whatever the arrivals' order was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from .cache import load_or_compile
from .checks import check_dtype
from .persistent import Build, persistent_tile
from .scatter import PIECE_BYTES, WARP
from .signal import MAX_PARTS

if TYPE_CHECKING:
    import torch

    from .forward import Tile

ARCHS = ("sm_90a",)
HEAD_DIM = 128  # with 64, three consumer groups leave too few registers for the sending warps: they spill
# 40 registers for the sending warps: upstream's 24 do not hold four 16-byte loads and their addresses. The consumers
# get by with 232 (no spills: tests/compile).
BUILD = Build(release=True, registers=(232, 40))
SENDERS = 2  # warps of a CTA
UNROLL = 4  # 16-byte loads that a lane has in flight
BATCHES = 2  # of UNROLL loads, for each unit of work


class Counter(IntEnum):
    """u64 words in this GPU's memory, for one plan. Zero between launches: the last sender to finish resets them."""

    TICKET = 0  # units handed out
    DONE = 1  # senders that found no unit left
    FAULT = 2  # waits that failed; never reset
    SENT = 3  # and on: units of each step that are stored


class Step(IntEnum):
    """Words of a step of the sends, int64: rows [0, ROWS) of TENSORS tensors from FIRST on (q, k, v = 0, 1, 2), heads
    [HEAD, HEAD + HEADS) of those that belong to rank PEER."""

    FIRST = 0
    TENSORS = 1
    HEAD = 2
    HEADS = 3
    ROWS = 4
    BEGIN = 5  # first unit
    END = 6  # behind the last
    PEER = 7
    WORD = 8  # where the epoch goes when all units are stored
    FINGERPRINT = 9  # where the configuration goes before that
    TO = 10  # three addresses: where row 0 of head 0 belongs in the peer's Q, K, V
    WORDS = 13


class Send(NamedTuple):
    """One step: a part, to the rank that finds this one `distance` places on. Distance 0: this rank's own part 0."""

    distance: int
    part: int


def send_order(num_ranks: int, kv_parts: int, queries_first: int, own: bool) -> list[Send]:
    """In the order in which they are needed: the own rows that share a key tile with the next chunk, keys and values
    distance by distance, then queries. queries_first: for so many ranks the queries go before all keys, since the first
    wave holds tiles of theirs."""
    everyone = range(1, num_ranks)
    queries = [Send(d, kv_parts) for d in everyone]
    keys = [Send(d, part) for d in everyone for part in range(kv_parts)]
    return ([Send(0, 0)] if own else []) + queries[:queries_first] + keys + queries[queries_first:]


def whole_parts(heads: int, kv_parts: int) -> int:
    """At most kv_parts, so that each group of heads has some."""
    group = -(-heads // kv_parts)
    return -(-heads // group)


class Geometry(NamedTuple):
    """What of one rank's exchange is plain arithmetic. rows: of one rank (s); heads: of one rank (h)."""

    rows: int
    heads: int
    head_dim: int
    num_ranks: int
    tile_keys: int
    kv_parts: int
    itemsize: int = 2

    @property
    def keys(self) -> int:
        return self.rows * self.num_ranks

    @property
    def group_heads(self) -> int:
        """Heads of one part of K and V."""
        return -(-self.heads // self.kv_parts)

    @property
    def own_rows(self) -> int:
        """Own rows in the key tile that the next chunk's last rows share, as far as there is such a tile."""
        return min(self.rows, -(self.keys - self.rows) % self.tile_keys) if self.num_ranks > 1 else 0

    @property
    def unit_rows(self) -> int:
        return WARP * PIECE_BYTES // (self.head_dim * self.itemsize) * UNROLL * BATCHES

    def steps(self, sends: Sequence[Send]) -> list[list[int]]:
        """Step.FIRST to Step.END of each send."""
        table, begin = [], 0
        for distance, part in sends:
            first, tensors = (0, 1) if part == self.kv_parts else (1, 2)
            head, heads = 0, self.heads
            if distance and first:
                head = part * self.group_heads
                heads = min(self.group_heads, self.heads - head)
            rows = self.rows if distance else self.own_rows
            end = begin + tensors * heads * -(-rows // self.unit_rows)
            table.append([first, tensors, head, heads, rows, begin, end])
            begin = end
        return table


class OverlapForward:
    """A loaded kernel; OverlapPlan holds what does not change from call to call.

    (q, k, v, o, lse, scale, pace_ns, own_first, num_sms, q_in, k_in, v_in, steps, sources, counters, send_pace_ns,
    kv_parts, own_rows, fingerprint, *publication) on torch's current stream. q to pace_ns, and publication: as for
    persistent.Forward; flags hold ADVANCE. own_first: how many of the own chunk's tiles come before the peers'; the
    others come last. q_in, k_in, v_in: (1, s, H, D). steps: int64 [n * Step.WORDS]. sources: int64 [num_ranks], the
    rank whose chunk is c. counters: int64 [Counter.SENT + n], zeroed once. send_pace_ns: pause of a sending warp behind
    each unit, 0 for none.
    """

    def __init__(self, kernel: Callable[..., None], tile: Tile, num_sms: int):
        self._kernel, self.tile, self.num_sms = kernel, tile, num_sms

    def __call__(self, *arguments: Any) -> None:
        self._kernel(*arguments)


def load_overlap(
    head_dim: int, dtype: str, arch: str, num_sms: int, tile: tuple[int, int] | None = None, with_lse: bool = False
) -> OverlapForward:
    """num_sms is no part of the compiled kernel."""
    chosen = persistent_tile(head_dim, arch, tile)
    check_dtype(dtype)
    if head_dim != HEAD_DIM or arch not in ARCHS:
        raise ValueError(f"no overlapped kernel for {arch} with head_dim {head_dim}; {ARCHS[0]} has {HEAD_DIM}")
    key: dict[str, Any] = {"arch": arch, "head_dim": head_dim, "dtype": dtype, "tile": list(chosen)}
    key |= {"with_lse": with_lse, "build": list(BUILD)}

    def make() -> Any:
        from .overlap_kernels import compile_overlap

        return compile_overlap(head_dim, dtype, arch, chosen, with_lse, BUILD)

    return OverlapForward(load_or_compile(f"overlap-{arch}-d{head_dim}-{dtype}", key, make), chosen, num_sms)


class OverlapPlan:
    """One rank's layer with its tables on the device: a call is one launch.

    Make it outside of CUDA graph capture; a graph that captured a call needs the plan alive. Its calls must follow each
    other in stream order.
    """

    def __init__(
        self,
        kernel: OverlapForward,
        geometry: Geometry,
        sends: Sequence[Send],
        sources: Sequence[int],
        chunk_at: Sequence[int],
        addresses: Sequence[Sequence[int]],
        words: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        """sources: the rank whose chunk is c here. chunk_at: which chunk is mine on each rank. addresses: of every
        rank's Q, K, V as mapped here, [3][P]. words: where this rank's part 0 and its fingerprint are told to each
        rank, in that one's signal block; further parts behind part 0."""
        import torch

        ranks, row_bytes = geometry.num_ranks, geometry.heads * geometry.head_dim * geometry.itemsize
        if geometry.kv_parts >= MAX_PARTS or whole_parts(geometry.heads, geometry.kv_parts) != geometry.kv_parts:
            raise ValueError(
                f"kv_parts is below {MAX_PARTS} and divides {geometry.heads} heads into groups that all have some, "
                f"not {geometry.kv_parts}; see whole_parts"
            )
        table = []
        for (distance, part), step in zip(sends, geometry.steps(sends), strict=True):
            peer = chunk_at.index(distance)
            at = (distance * geometry.rows, *(2 * [geometry.keys - (distance + 1) * geometry.rows]))
            parts, mark = words[peer]
            table += [*step, peer, parts + 8 * part, mark]
            table += [buffers[peer] + row * row_bytes for buffers, row in zip(addresses, at)]
        self.kernel, self.geometry = kernel, geometry
        self._tables = (
            torch.tensor(table, dtype=torch.int64, device=device),
            torch.tensor(list(sources)[:ranks], dtype=torch.int64, device=device),
            torch.zeros(Counter.SENT + len(sends), dtype=torch.int64, device=device),
        )

    def __call__(
        self,
        attention: tuple[Any, ...],
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        send_pace_ns: int,
        fingerprint: int,
        publication: tuple[Any, ...],
    ) -> None:
        """attention: q to num_sms of the kernel's arguments."""
        g = self.geometry
        self.kernel(*attention, *inputs, *self._tables, send_pace_ns, g.kv_parts, g.own_rows, fingerprint, *publication)
