"""Bad arguments, disagreement between ranks, and how a group goes on afterwards."""

import re
import time

import numpy as np
import pytest
import torch
from workers import attempt, forget, inputs, works

import fa_a2a
from fa_a2a import HeadShards, UlyssesAttention, attention_gather, scatter_heads

SECONDS = 5.0  # an error must reach every rank within these, on a busy machine; the deadline is 30


def call(rank, size, change=None, **options):
    """A layer call whose inputs `change` has spoilt."""
    q, k, v = inputs(rank, size)
    if change is not None:
        q, k, v = change(q, k, v)
    UlyssesAttention(**{"kernel": "cpu", "exchange": "fused", "timeout_s": 30, **options})(q, k, v)


def distributed(t):
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    return DTensor.from_local(t, init_device_mesh("cpu", (2,)), [Shard(1)])


BAD = {
    "three dimensions": (lambda q, k, v: (q[0], k[0], v[0]), "ShapeError", "q must be a tensor .batch, seq.*3 dim"),
    "not a tensor": (lambda q, k, v: (q, k.tolist(), v), "ShapeError", "k must be a tensor.*got list"),
    "missing": (lambda q, k, v: (None, k, v), "ShapeError", "q must be a tensor.*got NoneType"),
    "k dtype": (lambda q, k, v: (q, k.half(), v), "ShapeError", "one dtype and device.*k torch.float16"),
    "v device": (lambda q, k, v: (q, k, v.to("meta")), "ShapeError", "one dtype and device.*v torch.float32 on meta"),
    "all on meta": (lambda *qkv: [t.bfloat16().to("meta") for t in qkv], "ShapeError", "cpu or cuda, got meta"),
    "k shape": (lambda q, k, v: (q, k[:, :4], v), "ShapeError", "k and v one shape; got q .1, 8, 4, 16., k .1, 4"),
    "fewer rows of k and v": (lambda q, k, v: (q, k[:, :4], v[:, :4]), "ShapeError", "the same tokens.*whole_kv=True"),
    "key heads": (lambda q, k, v: (q, k[:, :, :3], v[:, :, :3]), "ShapeError", "multiple of the key heads"),
    "more key heads": (lambda q, k, v: (q[:, :, :2], k, v), "ShapeError", "multiple of the key heads"),
    "no rows": (lambda *qkv: [t[:, :0] for t in qkv], "ShapeError", "must not be empty"),
    "no batch": (lambda *qkv: [t[:0] for t in qkv], "ShapeError", "must not be empty"),
    "float64": (
        lambda *qkv: [t.double() for t in qkv],
        "ShapeError",
        "dtype must be one of bfloat16, float16, float32",
    ),
    "integers": (lambda *qkv: [t.int() for t in qkv], "ShapeError", "dtype must be one of"),
    "head_dim": (lambda *qkv: [t[..., :12] for t in qkv], "ShapeError", "multiple of 8, got 12"),
    "of all ranks": (lambda *qkv: [distributed(t) for t in qkv], "ShapeError", "got DTensor; pass .to_local()"),
    "heads": (lambda *qkv: [t[:, :, :1] for t in qkv], "ShapeError", "at least one head: 1 heads over 2 ranks"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_on_every_rank_is_one_error_and_the_group_goes_on(ranks, name):
    _change, error, text = BAD[name]
    for outcome, well in ranks(2).run(everywhere, name=name):
        assert outcome.error == error, outcome
        assert re.search(text, outcome.text), outcome.text
        assert outcome.seconds < SECONDS
        assert well


def everywhere(rank, size, name):
    return attempt(call, rank, size, BAD[name][0]), works(rank, size)


OPTIONS = {
    "kernel": ({"kernel": "fa9"}, "ConfigurationError", "kernel must be"),
    "exchange": ({"exchange": "ring"}, "ConfigurationError", "exchange must be"),
    "torch cannot fuse": (
        {"kernel": "torch", "exchange": "fused"},
        "UnsupportedError",
        "cannot store into other ranks",
    ),
    "fa4 on cpu": ({"kernel": "fa4"}, "UnsupportedError", "'fa4' runs on NVIDIA GPUs"),
    "no lse from torch": ({"kernel": "torch", "return_lse": True}, "UnsupportedError", "no log-sum-exp"),
    "negative deadline": ({"timeout_s": -1.0}, "ConfigurationError", "timeout_s must be"),
    "nan deadline": ({"timeout_s": float("nan")}, "ConfigurationError", "timeout_s must be"),
    "no deadline": ({"timeout_s": "never"}, "ConfigurationError", "timeout_s must be"),
    "nan scale": ({"scale": float("nan")}, "ConfigurationError", "scale must be"),
    "scale past floats": ({"scale": 10**400}, "ConfigurationError", "scale must be"),
    "lse by a number": ({"return_lse": np.bool_(True)}, "ConfigurationError", "return_lse must be True or False"),
    "text as scale": ({"scale": "big"}, "ConfigurationError", "scale must be"),
    "sizes of three ranks": ({"shard_sizes": [8, 4, 4]}, "ShapeError", "a number for each of 2 ranks, got [8, 4, 4]"),
    "sizes of no rank": ({"shard_sizes": [16, 0]}, "ShapeError", "shard_sizes"),
    "sizes that are not the rows": ({"shard_sizes": [9, 9]}, "ShapeError", "9 tokens; q has 8 rows"),
    "sizes that are no integers": ({"shard_sizes": [7.5, 8.5]}, "ShapeError", "must be a list of integers, got [7.5"),
    "a number as sizes": ({"shard_sizes": 8}, "ShapeError", "must be a list of integers, got 8"),
    "only text": ({"replicated_text": 8}, "ShapeError", "more than 8 rows, got 8"),
    "text that is no number": ({"replicated_text": "hello"}, "ConfigurationError", "must be a number of rows or None"),
    "lengths of two entries": ({"key_lengths": [3, 4]}, "ShapeError", "one number for each batch entry (1),"),
    "no key": ({"key_lengths": torch.tensor([0])}, "ShapeError", "from 1 to the 16 keys"),
    "more keys than there are": ({"key_lengths": [17]}, "ShapeError", "from 1 to the 16 keys"),
    "lengths without values": ({"key_lengths": torch.ones(1, device="meta").int()}, "ShapeError", "must have values"),
    "a mask for lengths": ({"key_lengths": torch.ones(1, dtype=torch.bool)}, "ShapeError", "with integers"),
    "causal by a word": ({"causal": "yes"}, "ConfigurationError", "causal must be True or False"),
    "causal cross-attention": (
        {"whole_kv": True, "causal": True},
        "UnsupportedError",
        "whole_kv goes with key_lengths",
    ),
}


def with_options(rank, size, name):
    options = {"kernel": "cpu", "exchange": "auto", **OPTIONS[name][0]}
    return attempt(scatter_heads, *inputs(rank, size), **options), works(rank, size)


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_option_on_every_rank_is_one_error_and_the_group_goes_on(ranks, name):
    _, error, text = OPTIONS[name]
    for outcome, well in ranks(2).run(with_options, name=name):
        assert (outcome.error, text in outcome.text) == (error, True), outcome
        assert outcome.seconds < SECONDS
        assert well


def from_uneven(rank, size):
    q = torch.zeros(1, 2 * size + 1, 1, 16)
    return attempt(HeadShards.from_tensors, q, q, q, kernel="cpu"), works(rank, size)


def test_sequence_that_does_not_divide(ranks):
    for outcome, well in ranks(2).run(from_uneven):
        assert outcome.error == "ShapeError"
        assert "5 tokens over 2 ranks; pass shard_sizes=[3, 2] (say)" in outcome.text
        assert well


def bad_and_good_in_turn(rank, size):
    """One rank is always late: the others are in their next call before it has heard of the last one's error."""
    layer = UlyssesAttention(kernel="cpu", exchange="fused", timeout_s=20)
    good, bad = inputs(rank, size), [t.double() for t in inputs(rank, size)]
    layer(*good)
    found = []
    for turn in range(150):
        if turn % size == rank:
            time.sleep(0.002 * (turn % 3))
        found.append(attempt(layer, *bad).error)
        layer(*good)
    return set(found)


def test_an_error_of_all_ranks_is_not_taken_for_one_ranks_departure(ranks):
    assert ranks(3).run(bad_and_good_in_turn) == [{"ShapeError"}] * 3


ONE_WRONG = {
    "one row fewer": {"change": lambda *qkv: [t[:, :-1] for t in qkv]},
    "another dtype": {"change": lambda *qkv: [t.half() for t in qkv]},
    "more heads": {"change": lambda *qkv: [torch.cat([t, t], 2) for t in qkv]},
    "heads that do not divide": {"change": lambda *qkv: [t[:, :, 1:] for t in qkv]},
    "fewer key heads": {"change": lambda q, k, v: (q, k[:, :, ::2], v[:, :, ::2])},
    "sizes": {"shard_sizes": [9, 8, 7]},
    "the sizes of its own rows": {"change": lambda *qkv: [t[:, 1:] for t in qkv], "shard_sizes": [8, 7, 9]},
    "key lengths": {"key_lengths": [23]},
    "causal": {"causal": True},
    "text": {"replicated_text": 2},
    "cross-attention": {"whole_kv": True},
    "another batch": {"change": lambda *qkv: [torch.cat([t, t]) for t in qkv]},
    "float64": {"change": lambda *qkv: [t.double() for t in qkv]},
    "no tensors": {"change": lambda *qkv: (None, None, None)},
    "another scale": {"scale": 0.7},
    "asks for lse": {"return_lse": True},
    "another exchange": {"exchange": "collective"},
    "another kernel": {"kernel": "torch", "exchange": "auto"},
    "unknown kernel": {"kernel": "fa9"},
    "bad deadline": {"timeout_s": -1.0},
    "scale without meaning": {"scale": "big"},
}


def one_wrong(rank, size, name, good_calls, wrong_ranks, exchange):
    """Ranks `wrong_ranks` depart from the others after some good calls; with none, at the group's first call."""
    fa_a2a.close()
    options = {"kernel": "cpu", "exchange": exchange}
    for seed in range(good_calls):
        UlyssesAttention(**options)(*inputs(rank, size, seed=seed))
    spoilt = dict(ONE_WRONG[name]) if rank in wrong_ranks else {}
    q, k, v = inputs(rank, size)
    if change := spoilt.pop("change", None):
        q, k, v = change(q, k, v)
    outcome = attempt(scatter_heads, q, k, v, **{**options, "timeout_s": 30, **spoilt})
    usable = works(rank, size) if not good_calls else None
    fa_a2a.close()
    return outcome, usable, works(rank, size)


def check_one_wrong(results, good_calls):
    for outcome, usable, well in results:
        assert outcome.error == "PeerMismatchError", [r[0] for r in results]
        assert outcome.seconds < SECONDS
        assert usable is (None if good_calls else True)
        assert well


@pytest.mark.parametrize("good_calls", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("name", ONE_WRONG)
def test_case_13_one_rank_wrong_is_the_same_error_on_every_rank(ranks, name, good_calls):
    results = ranks(3).run(one_wrong, name=name, good_calls=good_calls, wrong_ranks=(1,), exchange="fused")
    check_one_wrong(results, good_calls)


@pytest.mark.parametrize("good_calls", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("name", ["one row fewer", "heads that do not divide", "no tensors"])
def test_case_13_on_the_collective_path(ranks, name, good_calls):
    results = ranks(3).run(one_wrong, name=name, good_calls=good_calls, wrong_ranks=(1,), exchange="collective")
    for outcome, _, well in results:
        assert outcome.error == "PeerMismatchError"
        assert outcome.seconds < SECONDS
        assert well


@pytest.mark.parametrize("good_calls", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("name", ["one row fewer", "float64", "another exchange"])
def test_two_wrong_ranks_of_three(ranks, name, good_calls):
    results = ranks(3).run(one_wrong, name=name, good_calls=good_calls, wrong_ranks=(0, 2), exchange="fused")
    check_one_wrong(results, good_calls)


def known_but_different(rank, size):
    """Both shapes were agreed on before, so that only the fingerprint beside the data can tell."""
    layer = UlyssesAttention(kernel="cpu", exchange="fused")
    for rows in (4, 6):
        layer(*inputs(rank, size, rows=rows))
    outcome = attempt(layer, *inputs(rank, size, rows=6 if rank == 1 else 4))
    refused = attempt(layer, *inputs(rank, size, rows=4))
    fa_a2a.close()
    return outcome, refused, works(rank, size)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_two_known_configurations_at_once(ranks, size):
    for outcome, refused, well in ranks(size).run(known_but_different):
        assert outcome.error == "PeerMismatchError"
        assert outcome.seconds < SECONDS
        assert refused.error == "WorkspaceError"
        assert "poisoned" in refused.text
        assert "fa_a2a.close(group) on every rank" in refused.text
        assert well


def half_wrapped(rank, size):
    """Rank 0 scatters, rank 1 wraps tensors of its own; each way was agreed on before."""
    q, k, v = inputs(rank, size)
    heads = [torch.cat([t] * size, 1)[:, :, :2] for t in (q, k, v)]
    options = {"kernel": "cpu", "exchange": "fused"}

    def scattered():
        attention_gather(scatter_heads(q, k, v, **options))

    def wrapped():
        attention_gather(HeadShards.from_tensors(*heads, **options))

    scattered(), wrapped()
    outcome = attempt(scattered if rank == 0 else wrapped)
    fa_a2a.close()
    return outcome, works(rank, size)


def test_scattered_here_and_wrapped_there(ranks):
    for outcome, well in ranks(2).run(half_wrapped):
        assert outcome.error == "PeerMismatchError"
        assert outcome.seconds < SECONDS
        assert well


def no_kernel(rank, size):
    """Preparing the kernel, on GPUs its compilation, fails on rank 1 alone."""
    from fa_a2a.ops import cpu, kernels

    fa_a2a.close()
    real = cpu.make

    def broken(*_):
        raise RuntimeError("compiler not found")

    kernels.load.cache_clear()
    cpu.make = broken if rank == 1 else real
    try:
        call(rank, size)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    finally:
        cpu.make = real
        kernels.load.cache_clear()
    return found, works(rank, size)


def test_kernel_that_one_rank_cannot_prepare(ranks):
    (peer, well), (own, well_too) = ranks(2).run(no_kernel)
    assert own == "RuntimeError: compiler not found"
    assert peer == "PeerMismatchError: rank 1 could not prepare kernel 'cpu': RuntimeError: compiler not found"
    assert well
    assert well_too


def text_of_the_first_call(rank, size):
    fa_a2a.close()
    return attempt(call, rank, size, (lambda *qkv: [t[:, :-1] for t in qkv]) if rank == 1 else None)


def test_the_error_says_who_differs_in_what(ranks):
    ranks(2).run(forget)
    for outcome in ranks(2).run(text_of_the_first_call):
        assert "rank 0: seq_len=16; rank 1: seq_len=14; for shards of these sizes pass" in outcome.text
        assert "shard_sizes=[8, 7] on every rank" in outcome.text
