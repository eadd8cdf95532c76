"""RMS-norm over head_dim and rotary embedding of the pieces that a warp holds. Imports cutlass: only to compile."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .scatter import NormRope


class Transform:
    """Lane c of a group of `lanes` neighbours holds elements 8c to 8c + 7 of one head of one row. All arithmetic is in
    float32; what is stored is rounded once."""

    def __init__(self, norm_rope: NormRope, head_dim: int, lanes: int):
        self.options, self.head_dim, self.lanes = norm_rope, head_dim, lanes
        self.width = head_dim // lanes

    @cute.jit
    def apply(self, pieces: Any, rows: Any, which: Int32, extras, lane: Int32):
        """In place, for q (which = 0) and k (1); v stays as it is. `which` is the same in all lanes, which all take
        part."""
        q_weight, k_weight, cos, sin, eps = extras
        group_lane = lane % self.lanes
        if which < 2:
            weight = None
            if const_expr(self.options.norm):
                at = q_weight.iterator.toint()
                if which == 1:
                    at = k_weight.iterator.toint()
                weight = self.read(at, q_weight.element_type, self.width * group_lane, self.width)
            for piece, row in zip(pieces, rows):
                x = [piece[e].to(Float32) for e in range(self.width)]
                if const_expr(self.options.norm):
                    x = self.norm(x, weight, eps)
                if const_expr(self.options.rope != ""):
                    x = self.rope(x, cos, sin, row, group_lane)
                for e in cutlass.range_constexpr(self.width):
                    piece[e] = x[e].to(piece.element_type)

    def norm(self, x: list[Float32], weight: list[Float32], eps: Float32) -> list[Float32]:
        square = x[0] * x[0]
        for value in x[1:]:
            square += value * value
        distance = self.lanes // 2
        while distance:
            square += cute.arch.shuffle_sync_bfly(square, distance)
            distance //= 2
        scale = cute.math.rsqrt(square / self.head_dim + eps)
        return [value * scale * w for value, w in zip(x, weight)]

    @cute.jit
    def rope(self, x: Any, cos: cute.Tensor, sin: cute.Tensor, row: Int32, group_lane: Int32) -> Any:
        """rotated(x) * sin + x * cos, where rotated takes the partner of each element, negated for the first of the
        two. Partners are neighbours (interleaved) or half a head apart (halves)."""
        interleaved = const_expr(self.options.rope == "interleaved")
        step = const_expr(2 if interleaved and self.options.pairs else 1)  # elements for one entry of the table
        count = const_expr(self.width // step)
        first = group_lane * count
        if const_expr(self.options.pairs and not interleaved):
            first = first % (self.head_dim // 2)
        c, s = (self.row_entries(table, row, first, count) for table in (cos, sin))
        if const_expr(interleaved):
            partner = [x[e ^ 1] if e % 2 else -x[e ^ 1] for e in range(self.width)]
        else:
            sign = Float32(1.0)
            if group_lane < self.lanes // 2:
                sign = Float32(-1.0)
            partner = [sign * cute.arch.shuffle_sync_bfly(value, self.lanes // 2) for value in x]
        return [x[e] * c[e // step] + partner[e] * s[e // step] for e in range(self.width)]

    def row_entries(self, table: cute.Tensor, row: Int32, first: Int32, count: int) -> list[Float32]:
        dtype = table.element_type
        start = table.iterator.toint() + row * (table.stride[0] * (dtype.width // 8))
        return self.read(start, dtype, first, count)

    def read(self, base: Any, dtype: Any, first: Int32, count: int) -> list[Float32]:
        """`count` values from element `first` on, a multiple of count, in loads of up to 16 bytes."""
        size = dtype.width // 8
        per_load = min(count, 16 // size)
        values = []
        for i in range(count // per_load):
            where = base + (first + i * per_load) * size
            pointer = cute.make_ptr(dtype, where, cute.AddressSpace.gmem, assumed_align=per_load * size)
            held = cute.make_rmem_tensor(per_load, dtype)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(per_load)), held)
            values += [held[e].to(Float32) for e in range(per_load)]
        return values
