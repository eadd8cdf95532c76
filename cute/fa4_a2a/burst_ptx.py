"""PTX that only the microbenchmark needs, in the manner of ptx.py.

Apart from it because recorded figures name the files they depend on: a new instruction here leaves those of the
attention and signal kernels valid.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import T, dsl_user_op

from .ptx import _asm, _i32, _i64


@dsl_user_op
def store_weak_16(address: Int64, low: Int64, high: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes in one instruction, the widest an ordinary store gets; the address is a multiple of 16."""
    operands = [_i64(address, loc, ip), _i64(low, loc, ip), _i64(high, loc, ip)]
    _asm(None, operands, "st.global.v2.u64 [$0], {$1, $2};", "l,l,l", loc, ip)


# mbarriers, by their address in shared memory


@dsl_user_op
def mbarrier_init(barrier: Int32, arrivals: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """With the fence that lets bulk copies find it initialised."""
    text = "mbarrier.init.shared::cta.b64 [$0], $1; fence.mbarrier_init.release.cluster;"
    _asm(None, [_i32(barrier, loc, ip), _i32(arrivals, loc, ip)], text, "r,r", loc, ip)


@dsl_user_op
def mbarrier_expect(barrier: Int32, size_bytes: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrives; the phase ends when all have arrived and `size_bytes` have landed."""
    operands = [_i32(barrier, loc, ip), _i32(size_bytes, loc, ip)]
    _asm(None, operands, "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", loc, ip)


@dsl_user_op
def mbarrier_passed(barrier: Int32, parity: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """1 if the phase of that parity has ended. Does not wait, unlike try_wait, which may sleep."""
    text = (
        "{ .reg .pred passed; mbarrier.test_wait.parity.shared::cta.b64 passed, [$1], $2; selp.s32 $0, 1, 0, passed; }"
    )
    return Int32(_asm(T.i32(), [_i32(barrier, loc, ip), _i32(parity, loc, ip)], text, "=r,r,r", loc, ip))


@dsl_user_op
def clock(*, loc: Any = None, ip: Any = None) -> Int64:
    """Cycles of this SM. Compare within an SM only."""
    return Int64(_asm(T.i64(), [], "mov.u64 $0, %clock64;", "=l", loc, ip))
