"""The index arithmetic of the kernel for unequal slices, compiled for this CPU (its own file: the DSL reads the source
of what it compiles). Every 16 bytes that one launch moves, as (source, destination)."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from device_view import INT
from fa4_a2a.scatter_unequal_kernel import HEADS, UnequalScatter
from host_scatter import host_view

HEAD_DIM = 16


class Listing:
    """out[n] = the n-th piece; out[0] is (number of pieces, 0)."""

    def __init__(self):
        self.scatter = UnequalScatter(BFloat16, HEAD_DIM, 64, 2, None)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, destinations: cute.Tensor, out: cute.Tensor,
        rank: Int32, num_ranks: Int32,
    ):  # fmt: skip
        sources = (q, k, v)
        route = self.scatter.route(sources, rank, num_ranks, Int32(0))
        count = Int32(0)
        for tile in range(self.scatter.total(sources, route)):
            peer, which, batch, first = self.scatter.locate(tile, q.shape[0], route)
            entry = which * num_ranks + peer
            heads = Int32(self.scatter.field(destinations, HEADS, entry, route))
            units = q.shape[1] * heads * self.scatter.units_per_head
            source, to_row, to_head, target = self.scatter.places(sources, destinations, entry, which, batch, route)
            for unit in range(first, cutlass.min(first + self.scatter.tile_units, units)):
                count += 1
                out[count, 0] = source + self.scatter.offset(unit, heads, to_row, to_head)
                out[count, 1] = target + 16 * Int64(unit)
        out[0, 0] = Int64(count)


def list_pieces(tensors, table, out, rank, num_ranks):
    views = [host_view(t.shape, t.stride(), t.data_ptr()) for t in tensors]
    words = [host_view(t.shape, t.stride(), t.data_ptr(), INT, 64) for t in (table, out)]
    arguments = (*views, *words, Int32(rank), Int32(num_ranks))
    if not _known:
        _known.append(cute.compile(Listing(), *arguments))
    _known[0](*arguments)


_known = []
