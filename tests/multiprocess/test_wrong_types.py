"""Arguments of a wrong type on one rank: an error on every rank at once, and the group goes on."""

import os
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from workers import attempt, inputs, works

import fa_a2a
from fa_a2a import HeadShards, UlyssesAttention, attention_gather, scatter_heads
from fa_a2a.ops import kernels

SECONDS = 5.0  # within which an error must reach every rank; the deadline is 30


class Hostile(list):
    def __iter__(self):
        raise TypeError("not to be read")


WRONG = {
    "a list as kernel": ({"kernel": ["cpu"]}, "kernel must be"),
    "a dict as exchange": ({"exchange": {}}, "exchange must be"),
    "a list as scale": ({"scale": [0.5]}, "scale must be"),
    "True as scale": ({"scale": True}, "scale must be"),
    "1 as return_lse": ({"return_lse": 0}, "return_lse must be"),
    "a list as return_lse": ({"return_lse": []}, "return_lse must be"),
    "1 as causal": ({"causal": 0}, "causal must be"),
    "a set as key lengths": ({"key_lengths": {16}}, "key_lengths must be"),
    "what raises as key lengths": ({"key_lengths": Hostile([16])}, "cannot be read: TypeError: not to be read"),
    "an integer past 64 bits": ({"shard_sizes": [10**30, 8]}, "shard_sizes must be"),
    "a tensor as sizes": ({"shard_sizes": torch.tensor([8, 8])}, "shard_sizes must be"),
    "True as text": ({"replicated_text": True}, "replicated_text must be"),
    "a deadline past what kernels count": (
        {"timeout_s": 1e10},
        "timeout_s must be .* at most 1e.09, got 10000000000.0",
    ),
    "a text as deadline": ({"timeout_s": "30"}, "timeout_s must be .* got '30'"),
}


def scattered(q, k, v, **options):
    attention_gather(scatter_heads(q, k, v, **options))


def wrapped(q, k, v, **options):
    attention_gather(HeadShards.from_tensors(*(torch.cat([t, t], 1)[:, :, :2] for t in (q, k, v)), **options))


def layer(q, k, v, **options):
    own = {name: options.pop(name) for name in ("kernel", "exchange", "timeout_s") if name in options}
    made = UlyssesAttention()
    for name, value in own.items():
        setattr(made, name, value)  # the constructor would refuse it before any rank calls
    made(q, k, v, **options)


CALLS = {"scattered": scattered, "wrapped": wrapped, "layer": layer}


def one_wrong(rank, size, call, name):
    """Rank 1 departs at the group's first call, and after good ones."""
    fa_a2a.close()
    good, found = {"kernel": "cpu", "exchange": "fused", "timeout_s": 30.0}, []
    for _ in range(2):
        outcome = attempt(CALLS[call], *inputs(rank, size), **good | (WRONG[name][0] if rank == 1 else {}))
        fa_a2a.close()
        found.append((outcome, works(rank, size)))
        CALLS[call](*inputs(rank, size), **good)
    return found


@pytest.mark.parametrize(("call", "size"), [*((call, 2) for call in CALLS), ("layer", 8)])
@pytest.mark.parametrize("name", WRONG)
def test_one_rank_wrong(ranks, call, size, name):
    results = ranks(size).run(one_wrong, call=call, name=name)
    for rank, found in enumerate(results):
        for later, (outcome, well) in enumerate(found):
            assert outcome.error == "PeerMismatchError", outcome
            there = rank != 1 and later  # the fingerprint tells that rank 1 departed, and not how
            assert re.search("rank 1's own error" if there else WRONG[name][1], outcome.text), outcome.text
            assert outcome.seconds < SECONDS
            assert well


UNKNOWN = {
    "attn_mask": (
        torch.ones(16, 16, dtype=torch.bool),
        "takes no argument 'attn_mask': masks are not taken.*key_lengths",
    ),
    "is_causal": (True, "it is named causal"),
    "copy": (True, "copy is an argument of the module: UlyssesAttention"),
    "colour": (1, "takes no argument 'colour': see help"),
}


def unknown(rank, size, name, compiled):
    fa_a2a.close()
    made = UlyssesAttention(kernel="cpu", exchange="fused")
    call = torch.compile(made, backend="eager", fullgraph=True) if compiled else made
    with torch.no_grad():
        outcome = attempt(call, *inputs(rank, size), **({name: UNKNOWN[name][0]} if rank else {}))
    fa_a2a.close()
    return outcome, works(rank, size)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_argument_that_there_is_not_on_one_rank(ranks, name, compiled):
    for outcome, well in ranks(2).run(unknown, name=name, compiled=compiled):
        assert outcome.error == "PeerMismatchError", outcome
        assert re.search(UNKNOWN[name][1], outcome.text), outcome.text
        assert outcome.seconds < (60 if compiled else SECONDS)
        assert well


def out_of_step(rank, size):
    """Two configurations that both ranks know, in another order on rank 1."""
    fa_a2a.close()
    made = UlyssesAttention(kernel="cpu", exchange="fused")
    both = inputs(rank, size), [torch.cat([t, t], 1) for t in inputs(rank, size)]
    for qkv in both:
        made(*qkv)
    outcome = attempt(made, *both[rank])
    fa_a2a.close()
    return outcome, works(rank, size)


def test_known_calls_out_of_step_are_told_as_that(ranks):
    for rank, (outcome, well) in enumerate(ranks(2).run(out_of_step)):
        assert outcome.error == "PeerMismatchError"
        assert f"rank {1 - rank} made call 3 with other arguments than rank {rank}" in outcome.text
        assert "all ranks have made before, but not in the same order" in outcome.text
        assert outcome.seconds < SECONDS and well


def mask_in_the_place_of_scale(rank, size):
    return attempt(UlyssesAttention(), *inputs(rank, size), torch.ones(16, 16, dtype=torch.bool))


def test_a_mask_behind_v_is_told_to_be_one(ranks):
    for outcome in ranks(2).run(mask_in_the_place_of_scale):
        assert "scale must be a finite number" in outcome.text and "key_lengths=[...]" in outcome.text


def wrong_at_the_end(rank, size, exchange, options):
    """Rank 1 gathers with an option of its own that is wrong."""
    shards = scatter_heads(*inputs(rank, size), kernel="cpu", exchange=exchange)
    return attempt(attention_gather, shards, **(options if rank else {})), works(rank, size, exchange=exchange)


@pytest.mark.parametrize("exchange", ["fused", "collective"])
@pytest.mark.parametrize("options", [{"copy": []}, {"timeout_s": "30"}])
def test_a_rank_that_gathers_wrongly_does_its_part_first(ranks, exchange, options):
    (good, well), (bad, well_too) = ranks(2).run(wrong_at_the_end, exchange=exchange, options=options)
    assert good.error == ""
    assert bad.error == "ConfigurationError" and "must be" in bad.text
    assert well and well_too


def environment(rank, size, name):
    """The variable is no number on rank 1."""
    fa_a2a.close()
    if rank:
        os.environ[name] = "soon"
    outcome = attempt(scatter_heads, *inputs(rank, size), kernel="cpu", exchange="fused")
    os.environ.pop(name, None)
    return outcome, works(rank, size)


def test_a_wrong_deadline_in_the_environment_of_one_rank(ranks):
    for outcome, well in ranks(2).run(environment, name="FA_A2A_TIMEOUT_S"):
        assert outcome.error == "PeerMismatchError" and "FA_A2A_TIMEOUT_S must be" in outcome.text
        assert outcome.seconds < SECONDS and well


def test_a_wrong_limit_of_compilation_in_the_environment_of_one_rank(ranks):
    found = ranks(2).run(environment, name="FA_A2A_COMPILE_TIMEOUT_S")
    assert [outcome.error for outcome, _ in found] == ["PeerMismatchError", "ConfigurationError"]
    for outcome, well in found:
        assert "FA_A2A_COMPILE_TIMEOUT_S must be" in outcome.text
        assert outcome.seconds < SECONDS and well


def unreadable_machine(rank, size):
    """A folder of compiled kernels that rank 1 must not look into, say."""
    fa_a2a.close()
    real = kernels.uncompiled
    if rank:

        def uncompiled(*_):
            raise PermissionError(13, "Permission denied")

        kernels.uncompiled = uncompiled
    outcome = attempt(scatter_heads, *inputs(rank, size), kernel="cpu", exchange="fused")
    kernels.uncompiled = real
    return outcome, works(rank, size)


def test_what_one_rank_cannot_find_out_is_told(ranks):
    for outcome, well in ranks(2).run(unreadable_machine):
        assert outcome.error == "PeerMismatchError" and "cannot be told: PermissionError" in outcome.text
        assert outcome.seconds < SECONDS and well


def sparse(t):
    return t.to_sparse()


def distributed(t):
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(t, mesh, [Replicate()], run_check=False)


def fake(t):
    return FakeTensorMode().from_tensor(t)


def asynchronous(t):
    return AsyncCollectiveTensor(t)


KINDS = {sparse: "a dense tensor", distributed: "own tokens", fake: "with values", asynchronous: "pass .wait"}


def same_shape_of_another_kind(rank, size, kind, everywhere, exchange):
    """After a good call, tensors of its shape, dtype and device that no kernel can load from."""
    fa_a2a.close()
    layer = UlyssesAttention(kernel="cpu", exchange=exchange, timeout_s=20)
    q, k, v = inputs(rank, size)
    layer(q, k, v)
    outcome = attempt(layer, kind(q) if rank or everywhere else q, k, v)
    fa_a2a.close()
    return outcome, works(rank, size)


@pytest.mark.parametrize("exchange", ["fused", "collective"])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_another_kind_after_a_good_call(ranks, kind, everywhere, exchange):
    results = ranks(2).run(same_shape_of_another_kind, kind=kind, everywhere=everywhere, exchange=exchange)
    for rank, (outcome, well) in enumerate(results):
        assert outcome.error == ("ShapeError" if everywhere else "PeerMismatchError"), outcome
        assert KINDS[kind] in outcome.text or (rank == 0 and exchange == "fused")
        assert outcome.seconds < SECONDS and well
