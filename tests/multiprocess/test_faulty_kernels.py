"""Kernels that skip a tile, store past a buffer or fail, and what debug mode shows of it."""

import os
import time

import torch
from workers import attempt, inputs, works

import fa_a2a
from fa_a2a import UlyssesAttention
from fa_a2a.comm.group import resolve
from fa_a2a.layout import tile_order
from fa_a2a.ops import cpu

FUSED = {"kernel": "cpu", "exchange": "fused"}


def call(rank, size, timeout_s=2.0, seed=0):
    return UlyssesAttention(**FUSED, timeout_s=timeout_s)(*inputs(rank, size, seed=seed))


class Forgetful(type(cpu.make(torch.device("cpu"), torch.float32, 8, True, True))):
    """Leaves the first tile of every chunk but its own unwritten."""

    def fused(self, q, k, v, scale, sink, with_lse):
        keep = [(o.clone(), lse.clone()) for o, lse in zip(sink.o, sink.lse)]
        super().fused(q, k, v, scale, sink, with_lse)
        first = next(iter(tile_order(len(sink.o), sink.o[0].shape[2], sink.o[0].shape[1], cpu.TILE_ROWS)))
        rows = slice(first.row, first.row + first.rows)
        sink.o[first.chunk][:, rows, first.head] = keep[first.chunk][0][:, rows, first.head]


def skipped_tile(rank, size, debug):
    os.environ["FA_A2A_DEBUG"] = debug
    real = cpu.make
    cpu.make = lambda *_: Forgetful()
    try:
        fa_a2a.close()
        from fa_a2a.ops import kernels

        kernels.load.cache_clear()
        first = call(rank, size, seed=1).clone()
        second = call(rank, size, seed=2).clone()
    finally:
        cpu.make = real
        kernels.load.cache_clear()
        del os.environ["FA_A2A_DEBUG"]
    fa_a2a.close()
    return [int(out.isnan().any(-1).sum()) for out in (first, second)], works(rank, size)


def test_debug_mode_shows_a_skipped_tile_as_nan(ranks):
    assert ranks(2).run(skipped_tile, debug="1") == [([8, 8], True)] * 2
    assert ranks(2).run(skipped_tile, debug="0") == [([0, 0], True)] * 2


def damaged_guard(rank, size):
    """Rank 0 stores one byte past rank 1's O; rank 1 finds it at the end of its call."""
    os.environ["FA_A2A_DEBUG"] = "1"
    try:
        assert works(rank, size)
        workspace = resolve(None).workspace
        end = workspace.map.offset("o") + workspace.map.capacity("o")
        if rank == 0:
            workspace.block.peers[1][end] = 7
        outcome = attempt(call, rank, size)
        torch.distributed.barrier()
        fa_a2a.close()
        return outcome, end, works(rank, size)
    finally:
        del os.environ["FA_A2A_DEBUG"]


def test_debug_mode_finds_a_store_past_a_buffer(ranks):
    (fine, _, well), (damaged, end, well_too) = ranks(2).run(damaged_guard)
    assert fine.error == ""
    assert damaged.error == "WorkspaceError"
    assert f"guard regions at bytes [{end}] were overwritten" in damaged.text
    assert well
    assert well_too


class Failing(type(cpu.make(torch.device("cpu"), torch.float32, 8, True, True))):
    def fused(self, q, k, v, scale, sink, with_lse):
        raise RuntimeError("no such instruction")


def kernel_failure(rank, size):
    """The kernel raises on rank 1 alone, in the middle of a call; the deadline is far."""
    from fa_a2a.ops import kernels

    fa_a2a.close()
    real = cpu.make
    kernels.load.cache_clear()
    if rank == 1:
        cpu.make = lambda *_: Failing()
    try:
        began = time.monotonic()
        try:
            call(rank, size, timeout_s=60)
            own = ""
        except (RuntimeError, fa_a2a.errors.FaA2AError) as error:
            own = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        refused = attempt(call, rank, size)
    finally:
        cpu.make = real
        kernels.load.cache_clear()
    torch.distributed.barrier()
    fa_a2a.close()
    return own, seconds, refused, works(rank, size)


def test_kernel_failure_is_told_to_the_peers_at_once_and_close_recovers(ranks):
    results = ranks(3).run(kernel_failure)
    for rank, (own, seconds, refused, well) in enumerate(results):
        if rank == 1:
            assert own == "RuntimeError: no such instruction"
        else:
            assert own.startswith("PeerFailedError: rank 1 failed in call 1")
            assert "fa_a2a.close(group) on every rank" in own
        assert seconds < 10
        assert refused.error == "WorkspaceError"
        assert well


def failure_beside_an_agreement(rank, size):
    """The stores of rank 1's second call raise, while the others want to agree on a new shape for theirs."""
    fa_a2a.close()
    call(rank, size)
    if rank == 1:

        def broken(*_):
            raise RuntimeError("no memory")

        for prepared in resolve(None).workspace.prepared.values():
            if hasattr(prepared, "store"):
                prepared.store = broken
        time.sleep(0.3)
        outcome = None
        try:
            call(rank, size)
        except RuntimeError as error:
            outcome = str(error)
    else:
        outcome = attempt(UlyssesAttention(**FUSED, timeout_s=60), *inputs(rank, size, rows=11))
    torch.distributed.barrier()
    fa_a2a.close()
    return outcome, works(rank, size)


def test_a_failure_is_heard_of_in_an_agreement_too(ranks):
    for rank, (outcome, well) in enumerate(ranks(3).run(failure_beside_an_agreement)):
        if rank == 1:
            assert outcome == "no memory"
        else:
            assert outcome.error in ("PeerFailedError", "PeerTimeoutError"), outcome
            assert "rank 1 failed in call 2" in outcome.text
            assert outcome.seconds < 10
        assert well
