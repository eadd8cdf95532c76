"""The scatter kernels' index arithmetic, compiled for this CPU (its own file: the DSL reads the source of what it
compiles). Every tile of both paths, as (bytes, source address, destination address) of each copy."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.runtime import from_dlpack
from device_view import BFLOAT, _View
from fa4_a2a.scatter_bulk import BulkScatter
from fa4_a2a.scatter_kernel import StoreScatter

HEAD_DIM = 64


class Listing:
    """out[n] = the n-th copy; out[0] is (number of copies, 0, 0)."""

    def __init__(self, path: str):
        if path == "st":
            self.scatter = StoreScatter(BFloat16, HEAD_DIM, 64, 2, None)
        else:
            self.scatter = BulkScatter(BFloat16, HEAD_DIM, 64, 2, 1024)
        self.path = path

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, destinations: cute.Tensor, out: cute.Tensor,
        rank: Int32, num_ranks: Int32, own_last: Int32,
    ):  # fmt: skip
        sources = (q, k, v)
        route = self.scatter.route(sources, rank, num_ranks, own_last)
        count = Int32(0)
        for tile in range(self.scatter.total(sources, route)):
            peer, which, batch, first = self.scatter.locate(tile, q.shape[0], route)
            source, to_row, to_head, destination = self.scatter.ends(sources, destinations, peer, which, batch, route)
            if cutlass.const_expr(self.path == "st"):
                for unit in range(first, cutlass.min(first + self.scatter.tile_units, route[0])):
                    _, offset = self.scatter.inside(unit, to_row, to_head, route)
                    count += 1
                    self.note(out, count, Int64(16), source + offset, destination + 16 * Int64(unit))
            else:
                last = cutlass.min(first + self.scatter.tile_units, route[0])
                for number in range(self.scatter.tile_units):
                    begin, end, offset = self.scatter.run(number, first, last, to_row, to_head, route)
                    if begin < last:
                        count += 1
                        size = Int64(end - begin) * self.scatter.head_bytes
                        to = destination + self.scatter.head_bytes * Int64(begin)
                        self.note(out, count, size, source + offset, to)
        self.note(out, Int32(0), Int64(count), Int64(0), Int64(0))

    def note(self, out: cute.Tensor, at: Int32, *values: Int64) -> None:
        for i, value in enumerate(values):
            out[at, i] = value


def host_view(shape, strides, address, dtype_code=BFLOAT, bits=16):
    view = _View(shape, strides, dtype_code, bits, address)
    view.managed.tensor.device_type = 1
    return from_dlpack(_OnHost(view)).mark_layout_dynamic(leading_dim=len(shape) - 1)


class _OnHost:
    def __init__(self, view):
        self.view = view

    def __dlpack__(self, **_):
        return self.view.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)


def list_copies(path, sources, table, out, rank, num_ranks, own_last):
    arguments = (*sources, table, out, Int32(rank), Int32(num_ranks), Int32(own_last))
    if path not in _known:
        _known[path] = cute.compile(Listing(path), *arguments)
    _known[path](*arguments)


_known = {}
