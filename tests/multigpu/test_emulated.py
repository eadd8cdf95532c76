"""Two GPUs that each stand for one rank of more: where their stores go, and that a wrong one is found."""

import time

import pytest
import torch
import torch.distributed as dist

from fa_a2a.bench import emulate, slots
from fa_a2a.bench.emulation import Emulation
from fa_a2a.bench.record import read
from fa_a2a.bench.slots import Slots
from fa_a2a.bench.sweep import Case
from fa_a2a.comm.group import resolve
from fa_a2a.errors import FaA2AError, UnsupportedError
from fa_a2a.ops.kernels import Sink

RANKS = 8
SHAPE = {"batch": 1, "dtype": "bfloat16", "rounds": 2, "profile": None}


@pytest.fixture
def pair(device):
    if dist.get_world_size() != 2:
        pytest.skip("two ranks stand for more")
    return device


def case(seq_len=1024, num_heads=16, head_dim=128, kernel="fa4"):
    return Case(seq_len=seq_len, num_heads=num_heads, head_dim=head_dim, kernel=kernel, **SHAPE)


def test_slots_lie_on_both_gpus_and_go(pair):
    group, rank = resolve(None), dist.get_rank()
    free = []
    for _ in range(3):  # the first time the kernels of the test itself are loaded, too
        use_slots(pair, group, rank)
        torch.cuda.synchronize()
        dist.barrier()
        free.append(torch.cuda.mem_get_info(pair)[0])
    assert free[1] - free[2] < 2 << 20, "the slots' memory, 12 MiB, was not given back"


def use_slots(device, group, rank):
    slots = Slots(group, device, 4, 3 << 20)
    assert slots.stride >= 3 << 20 and len(slots.views) == 4 and len(slots.received) == 3
    steps = {b.data_ptr() - a.data_ptr() for a, b in zip(slots.views, slots.views[1:])}
    assert steps == {slots.stride}
    for c, view in enumerate(slots.views):
        view.fill_(10 * rank + c)
    torch.cuda.synchronize()
    dist.barrier()
    assert int(slots.views[0].unique()) == 10 * rank
    assert [int(view.unique()) for view in slots.received] == [10 * (1 - rank) + c for c in (1, 2, 3)]
    dist.barrier()
    slots.close()


def fail(error):
    def raiser(*_):
        raise error

    return raiser


@pytest.mark.parametrize("step", ["_granularity", "_export", "_swap"])
def test_what_one_rank_cannot_do_is_refused_on_both_at_once(pair, monkeypatch, step):
    group, begin = resolve(None), time.monotonic()
    with monkeypatch.context() as made:
        if dist.get_rank() == 1:
            made.setattr(slots, step, fail(UnsupportedError("made to fail")))
        with pytest.raises(UnsupportedError, match="rank 1: made to fail"):
            Slots(group, pair, 4, 3 << 20, timeout_s=30.0)
    assert time.monotonic() - begin < (15 if step == "_swap" else 5)
    use_slots(pair, group, dist.get_rank())


def test_an_error_of_one_rank_is_the_one_that_it_raises(pair, kernels_are_cached, monkeypatch):
    """The other one hears of it, and nobody waits for a deadline."""
    begin = time.monotonic()
    if dist.get_rank() == 1:
        monkeypatch.setattr(Emulation, "release", fail(RuntimeError("made to fail")))
    with pytest.raises(RuntimeError, match="made to fail" if dist.get_rank() == 1 else "rank 1 gave up: made to fail"):
        emulate.measure(case(), RANKS, pair, lambda: None, {})
    assert time.monotonic() - begin < 20
    assert resolve(None).poisoned is not None


@pytest.mark.parametrize(("num_ranks", "head_dim"), [(3, 128), (4, 128), (RANKS, 128), (RANKS, 64)])
def test_every_output_arrives_where_it_belongs(pair, tmp_path, num_ranks, head_dim):
    out = tmp_path / "emulated.jsonl"
    emulate.body(pair, [case(512 * num_ranks, 2 * num_ranks, head_dim)], num_ranks, False, out)
    if dist.get_rank() == 0:
        line = read(out)[-1]
        assert line["kind"] == "emulated" and line["bitwise_equal"]
        assert (line["num_ranks"], line["world_size"], line["local_heads"]) == (num_ranks, 2, 2)
        assert line["remote_bytes"] == (num_ranks - 1) * 512 * 2 * head_dim * 2
        assert line["fused_sender_us"] > 0 and line["fa_only_us"] > 0


@pytest.mark.parametrize("rows", [512, 136])  # 136: key tiles that two chunks share
@pytest.mark.parametrize("num_ranks", [3, 4, RANKS])
def test_the_layer_computes_what_its_ranks_would(pair, tmp_path, num_ranks, rows):
    out = tmp_path / "layer.jsonl"
    emulate.body(pair, [case(rows * num_ranks, 3 * num_ranks)], num_ranks, True, out)
    if dist.get_rank() == 0:
        lines = read(out)
        assert [line["mode"] for line in lines] == ["eager", "graph"]
        assert all(line["kind"] == "emulated_layer" and line["bitwise_equal"] for line in lines)
        assert all(line["overlapped_us"] > 0 and line["attention_us"] > 0 for line in lines)


def test_a_part_that_goes_to_a_wrong_place_is_found(pair, monkeypatch):
    """The keys of chunk 2 where those of chunk 3 belong, and the other way round: all words are set, as they should."""
    tokens = emulate.EmulatedLayer.tokens

    def swapped(self, gpu):
        q, k, v = tokens(self, gpu)
        if gpu == 1 and dist.get_rank() == 1 and not hasattr(self, "_release"):  # those that it sends alone
            h = self.shape.local_heads
            k = torch.cat([k[:, :, : 5 * h], k[:, :, 6 * h : 7 * h], k[:, :, 5 * h : 6 * h], k[:, :, 7 * h :]], dim=2)
        return [q, k, v]

    monkeypatch.setattr(emulate.EmulatedLayer, "tokens", swapped)
    with pytest.raises(FaA2AError, match="outputs are wrong: a bug"):
        emulate.measure_layer(case(), RANKS, pair, lambda: None)


def test_a_kernel_without_a_release_is_refused(pair):
    with pytest.raises(UnsupportedError, match="head_dim 96 does not"):
        Emulation(case(head_dim=96), RANKS, resolve(None), pair)


@pytest.mark.parametrize("wrong", ["swapped chunks", "a neighbour's heads", "one element"])
def test_a_wrong_output_is_found_on_both(pair, wrong, monkeypatch):
    make, right = Emulation.__init__, Emulation.expected

    def init(self, *arguments):
        make(self, *arguments)
        o = self.sink.o
        if dist.get_rank() == 0 and wrong == "swapped chunks":
            self.sink = Sink((o[0], o[2], o[1], *o[3:]), self.sink.lse)
        if dist.get_rank() == 0 and wrong == "a neighbour's heads":
            heads = slice(self.shape.local_heads, 2 * self.shape.local_heads)
            self.sink = Sink(tuple(x[:, :, heads] for x in self._outputs(self.slots.views)), self.sink.lse)

    def expected(self, gpu):
        out = right(self, gpu)
        if dist.get_rank() == 1 and wrong == "one element":
            out[3, 0, 5, 1, 7] += 1
        return out

    monkeypatch.setattr(Emulation, "__init__", init)
    monkeypatch.setattr(Emulation, "expected", expected)
    with pytest.raises(FaA2AError, match="outputs are wrong: a bug"):
        emulate.measure(case(), RANKS, pair, lambda: None, {})
