"""Outputs and calls over time: views and copies, changing shapes, calls out of turn, close, call numbers, forks."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from workers import attempt, inputs, works

import fa_a2a
from fa_a2a import UlyssesAttention, attention_gather, scatter_heads
from fa_a2a.comm import workspace
from fa_a2a.comm.group import resolve
from fa_a2a.layout import EPOCH_WORD


def lifetime(rank, size, copy):
    layer = UlyssesAttention(kernel="cpu", exchange="fused", copy=copy)
    other = UlyssesAttention(kernel="cpu", exchange="fused", copy=True)
    out, lse = layer(*inputs(rank, size, seed=1), return_lse=True)
    kept, kept_lse = out.clone(), lse.clone()
    later, later_lse = other(*inputs(rank, size, seed=2), return_lse=True)
    assert not torch.equal(kept, later)
    if copy:
        return torch.equal(out, kept) and torch.equal(lse, kept_lse)
    return torch.equal(out, later) and torch.equal(lse, later_lse)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("copy", [False, True])
def test_view_shows_the_next_call_and_a_copy_stays(ranks, copy, size):
    assert all(ranks(size).run(lifetime, copy=copy))


def chained(rank, size):
    """Layer after layer on views of the workspace, against copies."""
    view, copied = (UlyssesAttention(kernel="cpu", exchange="fused", copy=c) for c in (False, True))
    q, k, _v = inputs(rank, size, seed=5)
    a = b = q
    for _ in range(4):
        b = copied(b, k, b)
    for _ in range(4):
        a = view(a, k, a)
    return torch.equal(a, b)


@pytest.mark.parametrize("size", [4, 8])
def test_the_output_view_may_be_the_next_calls_input(ranks, size):
    assert all(ranks(size).run(chained))


def inference_then_plain(rank, size):
    fa_a2a.close()
    layer = UlyssesAttention(kernel="cpu", exchange="fused", copy=True)
    q, k, v = inputs(rank, size)
    with torch.inference_mode():
        first = layer(q, k, v).clone()
    second = layer(q, k, v)
    with torch.no_grad():
        third = layer(q, k, v)
    return torch.equal(first, second) and torch.equal(first, third)


def test_first_call_under_inference_mode_does_not_bind_the_later_ones(ranks):
    assert all(ranks(2).run(inference_then_plain))


def gradients(rank, size):
    layer = UlyssesAttention(kernel="cpu", exchange="fused")
    q, k, v = inputs(rank, size)
    refused = attempt(layer, q, k, v.requires_grad_())
    with torch.no_grad():
        out = layer(q, k, v)
    return refused.error, refused.text, out.requires_grad, works(rank, size)


def test_inputs_that_require_grad_are_refused_only_in_grad_mode(ranks):
    for error, text, requires_grad, well in ranks(2).run(gradients):
        assert error == "UnsupportedError"
        assert "v requires grad" in text
        assert "no_grad" in text
        assert not requires_grad
        assert well


def gated_in_place(rank, size):
    """An output is the caller's: what is done to it in place says nothing about the next one."""
    layer, found = UlyssesAttention(kernel="cpu", exchange="fused"), []
    gate = torch.full((), 2.0, requires_grad=True)
    q, k, v = inputs(rank, size)
    want, want_lse = (t.clone() for t in layer(q, k, v, return_lse=True))
    for _ in range(3):
        out, lse = layer(q, k, v, return_lse=True)
        found.append((out.requires_grad, lse.requires_grad, torch.equal(out, want), torch.equal(lse, want_lse)))
        out.mul_(gate), lse.mul_(gate)
        half, _ = attention_gather(scatter_heads(q, k, v, kernel="cpu", exchange="fused"))
        found.append((half.requires_grad, False, torch.equal(half, want), True))
        half.mul_(gate)
    return set(found)


def test_changes_in_place_tie_no_graph_to_the_workspace(ranks):
    assert ranks(2).run(gated_in_place) == [{(False, False, True, True)}] * 2


def two_shapes_in_turn(rank, size):
    layer = UlyssesAttention(kernel="cpu", exchange="fused", copy=True)
    serial = UlyssesAttention(kernel="cpu", exchange="collective")
    equal = []
    for call in range(50):
        rows, batch = ((9, 2), (8, 1), (17, 3))[call % 3]
        q, k, v = inputs(rank, size, rows=rows, batch=batch, seed=call)
        equal.append(torch.equal(layer(q, k, v), serial(q, k, v)))
    return all(equal)


def test_shapes_that_change_from_call_to_call(ranks):
    assert all(ranks(2).run(two_shapes_in_turn))


def forgotten_configurations(rank, size):
    from fa_a2a.ops import plan

    fa_a2a.close()
    known, plan.MAX_KNOWN = plan.MAX_KNOWN, 2
    try:
        return two_shapes_in_turn(rank, size), len(resolve(None).plans)
    finally:
        plan.MAX_KNOWN = known


def test_configurations_beyond_the_limit_are_agreed_on_anew(ranks):
    assert ranks(2).run(forgotten_configurations) == [(True, 2)] * 2


def out_of_turn(rank, size):
    q, k, v = inputs(rank, size, seed=1)
    big = inputs(rank, size, rows=300, seed=2)
    options = {"kernel": "cpu", "exchange": "fused"}
    want = UlyssesAttention(kernel="cpu", exchange="collective")(q, k, v)
    shards = scatter_heads(q, k, v, **options)
    found = {
        "scatter twice": attempt(scatter_heads, q, k, v, **options),
        "scatter twice, larger": attempt(scatter_heads, *big, **options),
    }
    out, _ = attention_gather(shards, copy=True)
    found["gather twice"] = attempt(attention_gather, shards)
    newer = scatter_heads(*inputs(rank, size, seed=3), **options)
    found["gather an older call"] = attempt(attention_gather, shards)
    attention_gather(newer)
    return found, torch.equal(out, want), works(rank, size)


def test_calls_out_of_turn_are_refused_and_do_no_harm(ranks):
    for found, equal, well in ranks(2).run(out_of_turn):
        for name, outcome in found.items():
            assert outcome.error == "WorkspaceError", (name, outcome)
            assert "alternate" in outcome.text, name
        assert equal
        assert well


def closing(rank, size):
    shards = scatter_heads(*inputs(rank, size), kernel="cpu", exchange="fused")
    workspace = resolve(None).workspace
    before = fa_a2a.memory_bytes()
    fa_a2a.close()
    after = fa_a2a.memory_bytes()
    stale = attempt(attention_gather, shards)
    works(rank, size)
    older = attempt(attention_gather, shards)
    fa_a2a.close()
    fa_a2a.close()
    return before, after, stale, older, attempt(workspace.check, 1.0), workspace.allocated_bytes, works(rank, size)


def test_close_frees_the_workspace_and_the_next_call_makes_one(ranks):
    for before, after, stale, older, closed, nbytes, well in ranks(2).run(closing):
        assert sum(before.values()) > 0
        assert sum(after.values()) == nbytes == 0
        assert stale.error == older.error == closed.error == "WorkspaceError"
        assert "fa_a2a.close" in closed.text
        assert well


def closed_by_hand(rank, size):
    works(rank, size)
    resolve(None).workspace.close(5.0)
    refused = attempt(UlyssesAttention(kernel="cpu", exchange="fused"), *inputs(rank, size))
    fa_a2a.close()
    return refused, works(rank, size)


def test_closed_workspace_refuses_with_the_way_out(ranks):
    for refused, well in ranks(2).run(closed_by_hand):
        assert refused.error == "WorkspaceError"
        assert "closed" in refused.text
        assert well


def wrap(rank, size, start):
    """Calls across the place where 32 bits, a sign or 64 bits would not do, ranks late by turns."""
    fa_a2a.close()
    workspace._FIRST_EPOCH = start
    try:
        assert works(rank, size)
    finally:
        workspace._FIRST_EPOCH = 0
    layer, serial = (UlyssesAttention(kernel="cpu", exchange=e) for e in ("fused", "collective"))
    well, epochs = [], []
    for number in range(5):
        q, k, v = inputs(rank, size, seed=number)
        if number % size == rank:
            time.sleep(0.05)  # whoever does not wait for this rank computes on the call before
        out = layer(q, k, v)
        well.append(torch.equal(out, serial(q, k, v)))
        epochs.append(resolve(None).workspace.memory.words(resolve(None).workspace.signals)[EPOCH_WORD])
    ahead = resolve(None).workspace.peers_ahead()
    dist.barrier()
    failing = attempt(scatter_heads, q, k, v, kernel="cpu", exchange="fused", timeout_s=0.3) if rank == 0 else None
    dist.barrier()
    if rank != 0:  # what rank 0 has told them ends this, not the deadline
        failing = attempt(layer, q, k, v)
    fa_a2a.close()
    return all(well), [e - start for e in epochs], ahead, failing


@pytest.mark.parametrize("start", [(1 << 32) - 3, (1 << 63) - 3, (1 << 64) - 3], ids=["32_bits", "sign", "64_bits"])
def test_call_numbers_wrap(ranks, start):
    for rank, (well, epochs, ahead, failing) in enumerate(ranks(3).run(wrap, start=start)):
        assert well
        assert [e % (1 << 64) for e in epochs] == [2, 3, 4, 5, 6], "one more each call"
        assert ahead == []
        assert failing.error == "PeerTimeoutError"
        assert failing.seconds < 10
        told = "rank 0 gave up waiting for rank 1" in failing.text
        assert told == (rank != 0), failing


def forked(rank, size):
    assert works(rank, size)
    q, k, v = inputs(rank, size)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            layer = UlyssesAttention(kernel="cpu", exchange="fused")
            outcomes = (attempt(layer, q, k, v), attempt(fa_a2a.close, timeout_s=1.0))
            os.write(writing, "\n".join(f"{o.error}: {o.text}" for o in outcomes).encode())
        finally:
            os._exit(0)
    os.close(writing)
    text = os.read(reading, 10000).decode()
    os.close(reading)
    os.waitpid(child, 0)
    return text.splitlines(), works(rank, size)


def test_forked_child_is_refused_and_the_parent_goes_on(ranks):
    for lines, well in ranks(2).run(forked):
        assert len(lines) == 2
        for line in lines:
            assert line.startswith("GroupError: the group was made in another process")
        assert well
