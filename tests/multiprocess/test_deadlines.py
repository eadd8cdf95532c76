"""Ranks that do not come, come late, or die; random delays; damage found in debug mode."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from workers import attempt, inputs, works

import fa_a2a
from fa_a2a import UlyssesAttention, attention_gather, scatter_heads

FUSED = {"kernel": "cpu", "exchange": "fused"}


def call(rank, size, timeout_s=2.0, seed=0, rows=8):
    return UlyssesAttention(**FUSED, timeout_s=timeout_s)(*inputs(rank, size, rows=rows, seed=seed))


def absent(rank, size, known, sleep_s):
    """Rank 1 stays away, or comes after the deadline."""
    fa_a2a.close()
    if known:
        call(rank, size, 20.0)
    if rank == 1:
        time.sleep(sleep_s)
    outcome = attempt(call, rank, size)
    refused = attempt(call, rank, size)
    torch.distributed.barrier()
    fa_a2a.close()
    return outcome, refused, works(rank, size)


def check_absent(results):
    for rank, (outcome, refused, well) in enumerate(results):
        assert outcome.error == "PeerTimeoutError", outcome
        if rank != 1:
            assert "rank 1" in outcome.text
        assert outcome.seconds < 7.0
        assert refused.error == "WorkspaceError"
        assert "poisoned" in refused.text
        assert "fa_a2a.close" in refused.text
        assert well
    # one rank waits out its deadline; the others, begun later, hear of it
    assert max(outcome.seconds for outcome, _, _ in (results[0], *results[2:])) > 1.0


def test_rank_late_at_the_first_call(ranks):
    check_absent(ranks(3).run(absent, known=False, sleep_s=3.0))


@pytest.mark.parametrize("size", [3, 8])
def test_rank_late_after_good_calls(ranks, size):
    check_absent(ranks(size).run(absent, known=True, sleep_s=3.0))


def one_does_not_gather(rank, size):
    """Rank 1 fails between the two halves of a call; rank 0 alone is poisoned by it, and all close."""
    call(rank, size, 20.0)
    shards = scatter_heads(*inputs(rank, size), **FUSED, timeout_s=20)
    outcome = attempt(attention_gather, shards, timeout_s=1.0) if rank == 0 else None
    torch.distributed.barrier()
    start = time.monotonic()
    closing = attempt(fa_a2a.close, timeout_s=20)
    return outcome, closing, time.monotonic() - start, works(rank, size)


def test_close_recovers_where_only_some_ranks_have_seen_the_error(ranks):
    results = ranks(2).run(one_does_not_gather)
    assert results[0][0].error == "PeerTimeoutError"
    assert "rank 1 did not finish the exchange after attention" in results[0][0].text
    for _, closing, seconds, well in results:
        assert closing.error == "", closing
        assert seconds < 5
        assert well


def closes_late(rank, size, late_s, deadline_s):
    call(rank, size, 20.0)
    if rank == 1:
        time.sleep(late_s)
    outcome = attempt(fa_a2a.close, timeout_s=deadline_s)
    torch.distributed.barrier()
    return outcome, works(rank, size)


def test_close_waits_for_every_rank_and_names_one_that_does_not_come(ranks):
    (waited, well), *_ = ranks(2).run(closes_late, late_s=0.5, deadline_s=20)
    assert waited.error == ""
    assert waited.seconds > 0.3
    assert well
    (gave_up, well), (_, well_too) = ranks(2).run(closes_late, late_s=1.5, deadline_s=0.5)
    assert gave_up.error == "PeerTimeoutError"
    assert "rank 1" in gave_up.text
    assert "'close' within 0.5 s" in gave_up.text
    assert well
    assert well_too


def bad_deadline_of_the_second_half(rank, size):
    outcomes = []
    for timeout_s in (-1.0, float("nan")):
        shards = scatter_heads(*inputs(rank, size), **FUSED)
        outcomes.append(attempt(attention_gather, shards, timeout_s=timeout_s).error)
        outcomes.append(attempt(attention_gather, shards).error)  # used up
    return outcomes, works(rank, size)


def test_bad_deadline_of_the_second_half_is_refused_after_it(ranks):
    errors = ["ConfigurationError", "WorkspaceError"] * 2
    assert ranks(2).run(bad_deadline_of_the_second_half) == [(errors, True)] * 2


def mostly_good(rank, size, calls):
    for seed in range(calls):
        call(rank, size, 20.0, seed=seed)
    return os.getpid()


def after_a_death(rank, size, rows):
    return attempt(call, rank, size, rows=rows)


def test_killed_rank_is_named_within_the_deadline(fresh_ranks):
    pool = fresh_ranks(3)
    pids = pool.run(mostly_good, calls=3)
    os.kill(pids[1], signal.SIGKILL)
    pool.processes[1].join(10)
    for rank in (0, 2):
        pool.pipes[rank].send((after_a_death, {"rows": 8}))
    for outcome in pool.collect(30, ranks=[0, 2]):
        assert outcome.error == "PeerTimeoutError"
        assert "rank 1 did not finish" in outcome.text
        assert 2.0 <= outcome.seconds < 7.0
    assert not list(Path("/dev/shm").glob("fa_a2a-*"))


def test_killed_store_host_is_a_peer_error_too(fresh_ranks):
    """Rank 0 holds the store of torch.distributed; a call that has to agree finds it gone."""
    pool = fresh_ranks(3)
    pids = pool.run(mostly_good, calls=1)
    os.kill(pids[0], signal.SIGKILL)
    pool.processes[0].join(10)
    for rank, rows in ((1, 8), (2, 5)):
        pool.pipes[rank].send((after_a_death, {"rows": rows}))
    for outcome in pool.collect(30, ranks=[1, 2]):
        assert outcome.error in ("PeerTimeoutError", "PeerMismatchError"), outcome
        assert outcome.seconds < 7.0


def delayed(rank, size, calls):
    """Every rank sleeps at random before each half; each call's result must be its own."""
    chance = random.Random(rank)
    serial = UlyssesAttention(kernel="cpu", exchange="collective")
    wrong = []
    for number in range(calls):
        q, k, v = inputs(rank, size, rows=3, heads=size, dim=8, seed=number)
        time.sleep(chance.choice((0, 0, 0.001, 0.004)))
        shards = scatter_heads(q, k, v, **FUSED, return_lse=True)
        time.sleep(chance.choice((0, 0, 0.001, 0.004)))
        out, lse = attention_gather(shards, copy=number % 2 == 0)
        want, want_lse = serial(q, k, v, return_lse=True)
        if not (torch.equal(out, want) and torch.equal(lse, want_lse)):
            wrong.append(number)
    return wrong


@pytest.mark.parametrize(("size", "calls"), [(4, 300), (8, 60)])
def test_calls_with_random_delays(ranks, size, calls):
    assert ranks(size).run(delayed, calls=calls) == [[]] * size


def unsynchronised(rank, size, calls):
    """Nothing but the protocol itself between the calls: ranks drift apart as far as it lets them."""
    chance = random.Random(rank + 100)
    layer = UlyssesAttention(**FUSED)
    data = [inputs(rank, size, rows=3, heads=size, dim=8, seed=number % 7) for number in range(7)]
    serial = UlyssesAttention(kernel="cpu", exchange="collective")
    want = [serial(*qkv) for qkv in data]
    wrong = []
    for number in range(calls):
        if chance.random() < 0.2:
            time.sleep(chance.random() * 0.003)
        if not torch.equal(layer(*data[number % 7]), want[number % 7]):
            wrong.append(number)
    return wrong


def test_500_calls_that_only_the_protocol_keeps_together(ranks):
    assert ranks(3).run(unsynchronised, calls=500) == [[]] * 3


def interrupted(rank, size):
    """Ctrl-C on rank 0 while it waits for rank 1, which is late: what is known of the peers no longer holds."""
    call(rank, size, 20.0)
    shards = scatter_heads(*inputs(rank, size), **FUSED, timeout_s=20)
    stopped = False
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            attention_gather(shards)
        except KeyboardInterrupt:
            stopped = True
        finally:
            signal.signal(signal.SIGALRM, previous)
    torch.distributed.barrier()
    refused = attempt(call, rank, size) if rank == 0 else None
    torch.distributed.barrier()
    fa_a2a.close()
    return stopped, refused, works(rank, size)


def interrupted_in_an_agreement(rank, size):
    """Ctrl-C on rank 0 while it waits for the others to agree on a new shape; then they make a call they know."""
    fa_a2a.close()
    call(rank, size, 20.0)
    stopped = False
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            call(rank, size, 60.0, rows=11)
        except KeyboardInterrupt:
            stopped = True
        finally:
            signal.signal(signal.SIGALRM, previous)
    torch.distributed.barrier()
    outcome = attempt(call, rank, size, 60.0)
    torch.distributed.barrier()
    fa_a2a.close()
    return stopped, outcome, works(rank, size)


def test_interrupted_agreement_ends_the_peers_next_call_at_once(ranks):
    (stopped, refused, well), *others = ranks(3).run(interrupted_in_an_agreement)
    assert stopped and well
    assert refused.error == "WorkspaceError"
    for _, outcome, well in others:
        assert outcome.error == "PeerFailedError", outcome
        assert "rank 0 failed in call 2" in outcome.text
        assert outcome.seconds < 10
        assert well


def test_interrupted_wait_poisons(ranks):
    (stopped, refused, well), (_, _, well_too) = ranks(2).run(interrupted)
    assert stopped
    assert refused.error == "WorkspaceError"
    assert "poisoned by an earlier error (KeyboardInterrupt)" in refused.text
    assert well
    assert well_too
