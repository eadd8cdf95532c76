"""PTX instructions with exactly the ordering they name, on raw 64-bit global addresses.

Every one is volatile and clobbers memory: neither LLVM nor ptxas moves other memory accesses of the thread across it.
The DSL has wrappers for some (cute.arch); these are here so that the ordering on the page is the ordering in the SASS,
and because a globaltimer that is not volatile is read once and kept.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result: Any, operands: list[Any], text: str, constraints: str, loc: Any, ip: Any) -> Any:
    clobbered = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    return llvm.inline_asm(
        result,
        operands,
        text,
        clobbered,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _i64(value: Any, loc: Any, ip: Any) -> Any:
    return Int64(value).ir_value(loc=loc, ip=ip)


def _i32(value: Any, loc: Any, ip: Any) -> Any:
    return Int32(value).ir_value(loc=loc, ip=ip)


# -- loads and stores -------------------------------------------------------------------------------------------------


@dsl_user_op
def load_acquire_sys(address: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    return Int64(_asm(T.i64(), [_i64(address, loc, ip)], "ld.acquire.sys.global.u64 $0, [$1];", "=l,l", loc, ip))


@dsl_user_op
def load_relaxed_sys(address: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    return Int64(_asm(T.i64(), [_i64(address, loc, ip)], "ld.relaxed.sys.global.u64 $0, [$1];", "=l,l", loc, ip))


@dsl_user_op
def load_weak(address: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """An ordinary load."""
    return Int64(_asm(T.i64(), [_i64(address, loc, ip)], "ld.global.u64 $0, [$1];", "=l,l", loc, ip))


@dsl_user_op
def store_relaxed_sys(address: Int64, value: Int64, *, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [_i64(address, loc, ip), _i64(value, loc, ip)], "st.relaxed.sys.global.u64 [$0], $1;", "l,l", loc, ip)


@dsl_user_op
def store_weak(address: Int64, value: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """An ordinary store, as a compiler makes it for a plain assignment."""
    _asm(None, [_i64(address, loc, ip), _i64(value, loc, ip)], "st.global.u64 [$0], $1;", "l,l", loc, ip)


@dsl_user_op
def store_shared(address: Int32, value: Int64, *, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [_i32(address, loc, ip), _i64(value, loc, ip)], "st.shared.u64 [$0], $1;", "r,l", loc, ip)


@dsl_user_op
def load_shared(address: Int32, *, loc: Any = None, ip: Any = None) -> Int64:
    return Int64(_asm(T.i64(), [_i32(address, loc, ip)], "ld.shared.u64 $0, [$1];", "=l,r", loc, ip))


# -- fences and atomics -----------------------------------------------------------------------------------------------


@dsl_user_op
def fence_acq_rel_sys(*, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [], "fence.acq_rel.sys;", "", loc, ip)


@dsl_user_op
def fence_proxy_async_shared(*, loc: Any = None, ip: Any = None) -> None:
    """This thread's ordinary shared-memory stores become visible to bulk copies that read shared memory."""
    _asm(None, [], "fence.proxy.async.shared::cta;", "", loc, ip)


@dsl_user_op
def fence_proxy_async(*, loc: Any = None, ip: Any = None) -> None:
    """What this thread has acquired, and what it wrote, is visible to bulk copies that it starts after it, in all
    memory."""
    _asm(None, [], "fence.proxy.async;", "", loc, ip)


@dsl_user_op
def add_acq_rel_gpu(address: Int64, value: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """Returns what was there before."""
    operands = [_i64(address, loc, ip), _i64(value, loc, ip)]
    return Int64(_asm(T.i64(), operands, "atom.add.acq_rel.gpu.global.u64 $0, [$1], $2;", "=l,l,l", loc, ip))


@dsl_user_op
def add_relaxed_gpu(address: Int64, value: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    operands = [_i64(address, loc, ip), _i64(value, loc, ip)]
    return Int64(_asm(T.i64(), operands, "atom.add.relaxed.gpu.global.u64 $0, [$1], $2;", "=l,l,l", loc, ip))


# -- bulk copies ------------------------------------------------------------------------------------------------------


@dsl_user_op
def bulk_store(destination: Int64, source: Int32, size_bytes: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """cp.async.bulk from shared to global memory, own or a peer's; addresses and size in multiples of 16 bytes."""
    operands = [_i64(destination, loc, ip), _i32(source, loc, ip), _i32(size_bytes, loc, ip)]
    _asm(None, operands, "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r", loc, ip)


@dsl_user_op
def bulk_load(
    destination: Int32, source: Int64, size_bytes: Int32, barrier: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """cp.async.bulk from global to shared memory, counted as bytes at the mbarrier; multiples of 16 bytes."""
    operands = [_i32(destination, loc, ip), _i64(source, loc, ip), _i32(size_bytes, loc, ip), _i32(barrier, loc, ip)]
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _asm(None, operands, text, "r,l,r,r", loc, ip)


@dsl_user_op
def bulk_commit(*, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [], "cp.async.bulk.commit_group;", "", loc, ip)


@dsl_user_op
def bulk_wait(*, loc: Any = None, ip: Any = None) -> None:
    """All bulk stores of this thread are complete: their writes are visible to this thread. Not yet to a peer."""
    _asm(None, [], "cp.async.bulk.wait_group 0;", "", loc, ip)


@dsl_user_op
def bulk_wait_read(pending: int = 0, *, loc: Any = None, ip: Any = None) -> None:
    """All groups of bulk stores of this thread but the last `pending` have read their source; it may be overwritten.
    Says nothing of the destination."""
    _asm(None, [], f"cp.async.bulk.wait_group.read {pending};", "", loc, ip)


# -- time and the end -------------------------------------------------------------------------------------------------


@dsl_user_op
def globaltimer(*, loc: Any = None, ip: Any = None) -> Int64:
    return Int64(_asm(T.i64(), [], "mov.u64 $0, %globaltimer;", "=l", loc, ip))


@dsl_user_op
def nanosleep(ns: int, *, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [], f"nanosleep.u32 {ns};", "", loc, ip)


@dsl_user_op
def trap(*, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [], "trap;", "", loc, ip)
