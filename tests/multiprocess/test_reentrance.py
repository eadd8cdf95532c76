"""Two modules, threads and groups at once; what is left half-way, kept alive too long, or collected in any order."""

import copy
import gc
import pickle
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from test_shared_memory import mapped
from workers import attempt, inputs, works

import fa_a2a
from fa_a2a import UlyssesAttention, attention_gather, scatter_heads
from fa_a2a.comm.group import resolve
from fa_a2a.errors import ShapeError
from fa_a2a.ops import cpu

FUSED = {"kernel": "cpu", "exchange": "fused"}
_made = {}


def second_group(size):
    """Another group of the same ranks; kept for the life of the pool."""
    if size not in _made:
        _made[size] = dist.new_group(list(range(size)))
    return _made[size]


def want(rank, size, seed, **kind):
    return UlyssesAttention(kernel="cpu", exchange="collective")(*inputs(rank, size, seed=seed, **kind))


def two_modules(rank, size):
    """Two layers of one model: halves in turn, outputs used before the next call."""
    wants = [want(rank, size, seed) for seed in range(4)]
    layers = [UlyssesAttention(**FUSED, copy=bool(i)) for i in range(2)]
    return all(
        torch.equal(layer(*inputs(rank, size, seed=seed)), wants[seed])
        for seed in (0, 1, 2, 3, 0, 2)
        for layer in layers
    )


@pytest.mark.parametrize("size", [2, 8])
def test_two_modules_in_turn(ranks, size):
    assert ranks(size).run(two_modules) == [True] * size


class Doubled(UlyssesAttention):
    def forward(self, *parts):
        return 2 * super().forward(*parts)


def copied_and_pickled(rank, size):
    """A subclass with a hook, an attribute and a group, copied; one without a group, pickled after a call."""
    parts, other = inputs(rank, size), dist.group.WORLD
    layer = Doubled(other, **FUSED, copy=True)
    layer.register_forward_hook(add_one)
    layer.note = [3]
    first = layer(*parts)
    twin = copy.deepcopy(torch.nn.Sequential(layer, layer))
    assert twin[0] is twin[1] and twin[0] is not layer and twin[0]._requested_group is other
    assert twin[0].note == [3] and twin[0].note is not layer.note
    plain = Doubled(**FUSED, copy=True).eval()
    plain(*parts)
    again = pickle.loads(pickle.dumps(plain))
    return torch.equal(twin[0](*parts), first), torch.equal(again(*parts) + 1, first), again.training, repr(again)


def add_one(module, parts, out):
    return out + 1


def test_copies_and_pickles_are_whole(ranks):
    text = "Doubled(kernel='cpu', exchange='fused', copy=True, timeout_s=30)"
    assert ranks(2).run(copied_and_pickled) == [(True, True, False, text)] * 2


def two_threads(rank, size, calls):
    """One thread for each group: they share processes and nothing else."""
    groups = [dist.group.WORLD, second_group(size)]
    wants = [[want(rank, size, seed, rows=4 + i) for seed in range(calls)] for i in range(2)]
    wrong, chance = [], random.Random(rank)

    def work(index):
        layer = UlyssesAttention(groups[index], **FUSED, timeout_s=30)
        for seed in range(calls):
            time.sleep(chance.choice((0, 0.001, 0.002)))
            if not torch.equal(layer(*inputs(rank, size, seed=seed, rows=4 + index)), wants[index][seed]):
                wrong.append((index, seed))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fa_a2a.close(groups[1])
    return wrong


def test_two_threads_on_two_groups(ranks):
    assert ranks(2).run(two_threads, calls=40) == [[], []]


class Slow(type(cpu.make(torch.device("cpu"), torch.float32, 8, True, True))):
    def fused(self, *arguments):
        time.sleep(0.3)
        super().fused(*arguments)


def intruder(rank, size):
    """A second thread calls while the first is inside attention; its stores would meet what a peer still reads."""
    from fa_a2a.ops import kernels

    fa_a2a.close()
    real, cpu.make = cpu.make, lambda *_: Slow()
    kernels.load.cache_clear()
    refused = []
    try:
        layer = UlyssesAttention(**FUSED, timeout_s=20)
        layer(*inputs(rank, size, seed=1))
        late = threading.Timer(0.15, lambda: refused.append(attempt(layer, *inputs(rank, size, seed=2))))
        late.start()
        out = layer(*inputs(rank, size, seed=1)).clone()
        late.join()
    finally:
        cpu.make = real
        kernels.load.cache_clear()
    fa_a2a.close()
    return refused, torch.equal(out, want(rank, size, 1)), works(rank, size)


def test_a_second_thread_inside_a_call_is_refused_and_does_no_harm(ranks):
    for (refused,), equal, well in ranks(2).run(intruder):
        assert refused.error == "WorkspaceError"
        assert "one thread for each group" in refused.text
        assert equal
        assert well


def raised_between(rank, size):
    """The caller's own error between two calls, and between the halves of one that it then finishes."""
    layer, found = UlyssesAttention(**FUSED), []
    for seed in range(3):
        shards = scatter_heads(*inputs(rank, size, seed=seed), **FUSED)
        with pytest.raises(ZeroDivisionError):
            raise ZeroDivisionError
        out, _ = attention_gather(shards)
        found.append(torch.equal(out, want(rank, size, seed)))
        with pytest.raises(ShapeError):
            layer(*(t[0] for t in inputs(rank, size)))
        found.append(torch.equal(layer(*inputs(rank, size, seed=seed)), want(rank, size, seed)))
    return all(found)


def test_exceptions_between_calls_leave_no_trace(ranks):
    assert ranks(2).run(raised_between) == [True, True]


def left_half_way(rank, size):
    """Rank 1 closes with a call half done. Rank 0, in the other half with a far deadline, hears of it at once."""
    assert works(rank, size)
    shards = scatter_heads(*inputs(rank, size), **FUSED, timeout_s=60)
    outcome = attempt(attention_gather, shards, timeout_s=60) if rank == 0 else None
    fa_a2a.close(timeout_s=20)
    return outcome, works(rank, size)


def test_a_call_closed_half_way_ends_the_peers_wait(ranks):
    (outcome, well), (_, well_too) = ranks(2).run(left_half_way)
    assert outcome.error == "PeerFailedError"
    assert "rank 1 failed in call" in outcome.text
    assert "left it unfinished" in outcome.text
    assert outcome.seconds < 10
    assert well
    assert well_too


def output_outlives(rank, size):
    """A view read after close, and after the next workspace was used: its own memory, unmapped with it."""
    fa_a2a.close()
    out = UlyssesAttention(**FUSED)(*inputs(rank, size, seed=3))
    kept = out.clone()
    fa_a2a.close()
    blocks = mapped()
    works(rank, size)
    same = torch.equal(out, kept)
    fa_a2a.close()
    del out
    gc.collect()
    return same, blocks > 0, mapped()


def test_close_while_an_output_is_alive(ranks):
    assert ranks(2).run(output_outlives) == [(True, True, 0)] * 2


def collected(rank, size):
    """Modules, shards, outputs and the group's objects dropped in every order that chance offers."""
    held = []
    for seed in range(8):
        chance = random.Random(seed)  # the same on every rank: close is collective
        layer = UlyssesAttention(**FUSED)
        shards = scatter_heads(*inputs(rank, size, seed=seed), **FUSED)
        out, _ = attention_gather(shards)
        things = {"layer": layer, "shards": shards, "out": out, "view": out[:, 1:], "group": resolve(None)}
        del layer, shards, out
        for name in chance.sample([*things, "close", "collect"], 7):
            if name == "close":
                fa_a2a.close()
            elif name == "collect":
                gc.collect()
            else:
                del things[name]
        fa_a2a.close()
        gc.collect()
        held.append(mapped())
    return held, works(rank, size)


def test_garbage_collection_in_any_order(ranks):
    assert ranks(2).run(collected) == [([0] * 8, True)] * 2


def ends_without_close(rank, size):
    global _alive
    _alive = UlyssesAttention(**FUSED)(*inputs(rank, size))
    return True


def test_a_process_may_end_with_outputs_alive_and_nothing_closed(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(ends_without_close)
    pool.stop()
    assert [process.exitcode for process in pool.processes] == [0, 0]


def made_anew(rank, size, turns):
    """The default group taken down and made anew on the same store, under the same name, with what it left there."""
    from torch.distributed import distributed_c10d as c10d

    store, errors = c10d._get_default_store(), []
    for turn in range(turns):
        assert works(rank, size)
        if rank == 0:  # gives up, and says so in the store: to the next group it must mean nothing
            layer = UlyssesAttention(**FUSED, timeout_s=0.3)
            errors.append(attempt(layer, *inputs(rank, size, rows=5)).error)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"gloo{turn}", store), rank=rank, world_size=size)
        c10d._world.pg_map[dist.group.WORLD] = (c10d._world.pg_map[dist.group.WORLD][0], store)
    return errors, works(rank, size)


def test_a_group_made_anew_does_not_read_what_the_old_one_left(fresh_ranks):
    (errors, well), (_, well_too) = fresh_ranks(2).run(made_anew, turns=3)
    assert errors == ["PeerTimeoutError"] * 3
    assert well
    assert well_too
