"""A rank that is killed or stopped at each stage of a call, and what becomes of the others."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_shared_memory import mapped, segments
from workers import attempt, coded, inputs, reference, shard, works

import fa_a2a
from fa_a2a import UlyssesAttention
from fa_a2a.comm.group import resolve
from fa_a2a.layout import Word
from fa_a2a.ops import cpu

DEADLINE_S = 1.0
DEADLINE_OF_EIGHT_S = 4.0  # so many processes on two cores may keep one of them waiting for a second
SLACK_S = 5.0  # on a busy machine
GOOD_CALLS = 3

# Where the victim ends in its call 4, and which step its peers miss in which call.
STAGES = {
    "before the exchange": ("before", 4),
    "in the exchange": ("before", 4),  # everything stored, nothing published
    "in attention": ("after", 4),  # half of the tiles stored
    "before the release": ("after", 4),
    "in the wait": ("before", 5),  # its tiles are all there: the others' call 4 is good
}


def end_at(stage, signal_number, group):
    """Has this process end itself, or stop, when it comes to the stage."""
    end = lambda: os.kill(os.getpid(), signal_number)
    memory = resolve(group).workspace.memory
    real_signal, real_wait, real_tile = memory.signal, memory._wait, cpu.attention_tile
    undo = []

    def once():
        for put_back in undo:
            put_back()
        end()

    def signalled(block, word, **steps):
        if word is (Word.ARRIVED if stage == "in the exchange" else Word.READY):
            once()
        real_signal(block, word, **steps)

    def waited(block, own, word, *rest):
        if word is Word.READY:
            once()
        real_wait(block, own, word, *rest)

    tiles = 0

    def tile(*arguments):
        nonlocal tiles
        tiles += 1
        if tiles == 2:
            once()
        return real_tile(*arguments)

    if stage == "before the exchange":
        end()
    elif stage == "in attention":
        cpu.attention_tile = tile
        undo.append(lambda: setattr(cpu, "attention_tile", real_tile))
    elif stage == "in the wait":
        memory._wait = waited
        undo.append(lambda: delattr(memory, "_wait"))
    else:
        memory.signal = signalled
        undo.append(lambda: delattr(memory, "signal"))


def call(rank, size, group, seed, timeout_s=DEADLINE_S):
    """A call that comes back is right, whatever became of the others."""
    whole = coded(1, 8 * size, 2 * size, 16, torch.float32, seed)
    layer = UlyssesAttention(group, kernel="cpu", exchange="fused", timeout_s=timeout_s)
    out = layer(*(shard(t, rank, size) for t in whole))
    assert (out.double() - shard(reference(*whole), rank, size)).abs().max() < 1e-5


_groups = {}


def make_groups(rank, size):
    """Ranks 0 and 1 with each of the others: a group to lose for each stage."""
    for victim in range(2, size):
        _groups[victim] = dist.new_group([0, 1, victim])
    return os.getpid()


def first_calls(rank, size, victim):
    me = min(rank, 2)
    fa_a2a.close(_groups[victim])
    layer = UlyssesAttention(_groups[victim], kernel="cpu", exchange="fused", timeout_s=30)
    for seed in range(GOOD_CALLS):
        layer(*inputs(me, 3, seed=seed))


def last_call(rank, size, victim, stage, signal_number):
    """The victim does not come back from it, or comes back late; the others' errors, call by call."""
    me, group = min(rank, 2), _groups[victim]
    if rank == victim:
        end_at(stage, signal_number, group)
    found = []
    for seed in range(3):
        found.append(attempt(call, me, 3, group, seed=seed))
        if found[-1].error:
            break
    return found


def closed_and_well(rank, size, victim):
    """The next victim's group is the one that goes on."""
    fa_a2a.close(_groups[victim])
    return mapped()


def check_survivors(results, stage):
    when, number = STAGES[stage]
    for outcomes in results:
        assert len(outcomes) == number - GOOD_CALLS, outcomes
        *good, last = outcomes
        assert not any(outcome.error for outcome in good)
        assert last.error == "PeerTimeoutError", last
        assert "rank 2" in last.text, "the missing rank is named"
        assert f"call {number}" in last.text
        assert f"{when} attention" in last.text
        assert DEADLINE_S <= last.seconds < DEADLINE_S + SLACK_S


def run_last_call(pool, victim, stage, signal_number):
    ranks = (0, 1, victim)
    for rank in ranks:
        pool.pipes[rank].send((first_calls, {"victim": victim}))
    pool.collect(60, ranks=ranks)
    for rank in ranks:
        pool.pipes[rank].send((last_call, {"victim": victim, "stage": stage, "signal_number": signal_number}))
    check_survivors(pool.collect(30, ranks=[0, 1]), stage)
    return ranks


@pytest.fixture(scope="module")
def victims():
    """Two survivors and a victim for each stage: one start of processes for all of them."""
    from rank_pool import RankPool

    pool = RankPool(2 + len(STAGES))
    pool.pids = pool.run(make_groups)
    yield pool
    pool.broken = True
    pool.stop()
    assert not any(process.is_alive() for process in pool.processes)
    assert segments() == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_rank_is_named_and_comes_back_to_an_error(victims, stage):
    victim = 2
    ranks = run_last_call(victims, victim, stage, signal.SIGSTOP)
    os.kill(victims.pids[victim], signal.SIGCONT)
    (outcomes,) = victims.collect(30, ranks=[victim])
    *_, last = outcomes
    assert last.error == "PeerTimeoutError", outcomes
    for rank in ranks:
        victims.pipes[rank].send((closed_and_well, {"victim": victim}))
    assert victims.collect(60, ranks=ranks) == [0, 0, 0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_is_named_and_the_others_go_on(victims, stage):
    victim = 2 + list(STAGES).index(stage)
    run_last_call(victims, victim, stage, signal.SIGKILL)
    victims.processes[victim].join(10)
    assert victims.processes[victim].exitcode == -signal.SIGKILL
    for rank in (0, 1):
        victims.pipes[rank].send((closed_and_well, {"victim": victim}))
    assert victims.collect(60, ranks=[0, 1]) == [0, 0], "no block of the group stays mapped"


def call_of_all(rank, size, victim, stage):
    """Good calls of all ranks, then one from which the victim does not come back."""
    for seed in range(GOOD_CALLS):
        call(rank, size, None, seed, timeout_s=30.0)
    dist.barrier()
    if rank == victim:
        end_at(stage, signal.SIGKILL, None)
    found = attempt(call, rank, size, None, seed=0, timeout_s=DEADLINE_OF_EIGHT_S)
    fa_a2a.close()
    return found, mapped()


def test_one_of_eight_ranks_is_killed(fresh_ranks):
    victim, pool = 5, fresh_ranks(8)
    survivors = [rank for rank in range(8) if rank != victim]
    for pipe in pool.pipes:
        pipe.send((call_of_all, {"victim": victim, "stage": "in attention"}))
    for outcome, held in pool.collect(90, ranks=survivors):
        assert outcome.error == "PeerTimeoutError", outcome
        assert "rank 5" in outcome.text, "the missing rank is named"
        assert outcome.seconds < DEADLINE_OF_EIGHT_S + SLACK_S and not held


def test_fresh_processes_work_at_once(fresh_ranks):
    """On the machine that the tests before have left."""
    began = time.monotonic()
    assert fresh_ranks(2).run(works) == [True, True]
    assert time.monotonic() - began < 60
    assert segments() == []


def stranded(rank, size):
    """Killed while memory is being shared, when a name would lie about."""
    group = resolve(None)
    real = group.exchange

    def exchange(topic, *rest):
        if topic == "shared memory mapped":
            store = dist.distributed_c10d._get_default_store()
            if rank:
                store.set("stranded", "")
            else:  # holds the store, and must not go before the other one is here
                store.wait(["stranded"])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(topic, *rest)

    group.exchange = exchange
    works(rank, size)


def test_all_ranks_killed_while_they_share_memory_leave_nothing(fresh_ranks):
    pool = fresh_ranks(2)
    before = set(Path("/dev/shm").glob("*"))
    pool.start(stranded)
    for process in pool.processes:
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
    assert not {path for path in set(Path("/dev/shm").glob("*")) - before if "fa_a2a" in path.name}
