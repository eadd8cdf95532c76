"""The host function of the persistent kernels, and what it takes besides attention's tensors.

A launch hands over plain arguments, since a tuple or a struct would cost the host time at each call; here they are put
in order once, while tracing. In the launch's order:

    q, k, v, o, lse, scale     as for forward.load_forward
    pace_ns, order, num_sms    as for persistent.Forward
    own arguments              what `accept` of the kernel names
    publication                the fields of Release; None each where the build does not publish
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .forward_kernels import left_out
from .persistent import Build
from .persistent_schedule import Release
from .persistent_slices import Slices
from .toolchain import vector

PUBLICATION = len(fields(Release))


def publication_arguments(build: Build) -> tuple[Any, ...]:
    """Placeholders for the fields of Release."""
    i32, i64 = Int32(0), Int64(0)
    return (vector(Int64), vector(Int64), i32, i32, i32, i64, i64) if build.release else (None,) * PUBLICATION


class Entry(Slices):
    """Comes before `upstream`, a forward of flash-attn-4's for `target`, among a kernel's bases."""

    upstream: type
    target: str

    def __init__(self, build: Build, **options: Any):
        super().__init__(**options)
        self.build = build

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse,
        scale: Float32,
        pace_ns: Int32,
        order: Int32,
        num_sms: Int32,
        *rest,
    ):
        """rest: own arguments, publication, stream."""
        own, publication, stream = rest[: -PUBLICATION - 1], rest[-PUBLICATION - 1 : -1], rest[-1]
        release = None
        if const_expr(self.build.release):
            release = Release(*publication)
        self.dtype = o.element_type  # sm_100 has no other before the call
        order, stamps = self.accept(order, *own)
        # for kernel() or the scheduler, which upstream calls with its own: Params.create's, behind the grid
        self.rest_of_params = (order, pace_ns, Int32(o.shape[1]), self.make_slices(o), stamps, release)
        self.grid_sms = num_sms
        self.upstream.__call__(self, q, k, v, o, lse, scale, *left_out(self.target), stream)

    def accept(self, order: Int32, stamps: cute.Tensor | None) -> tuple[Any, Any]:
        """Keeps own arguments for later; returns what Params get as order and as stamps."""
        return order, stamps
