"""Single calls through diffusers' dispatcher: what is carried out, handed over, and refused; and the clean end."""

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("diffusers")
from diffusion_models import build, clean, draw, forward, parallel
from workers import attempt, shard

from fa_a2a.integrations import diffusers as fa

BATCH, SEQ, HEADS, DIM = 2, 32, 4, 16


def parallel_config(size, **fields):
    """What enable_parallelism hands to the attention processors."""
    from diffusers import ContextParallelConfig, ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    context = ContextParallelConfig(**(fields or {"ulysses_degree": size}))
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(torch.distributed.get_rank(), size, torch.device("cpu"), mesh=mesh)
    return config


def dispatch(q, k, v, config, **options):
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    return dispatch_attention_fn(q, k, v, backend=AttentionBackendName("fa_a2a"), parallel_config=config, **options)


def whole(heads=HEADS, seq=SEQ, seed=0):
    return draw(BATCH, seq, heads, DIM, seed=seed)


def sdpa(q, k, v, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def keys_valid(seq=SEQ):
    return torch.arange(seq)[None] < torch.tensor([seq - 5, seq // 2 + 1])[:, None]


def case(name, rank, size):
    """(got, want) of this rank."""
    q, k, v = (whole(seed=s) for s in range(3))
    mine = [shard(x, rank, size) for x in (q, k, v)]
    config = parallel_config(size)
    mask = keys_valid()
    part = shard(mask, rank, size)
    rows = mask[:, None, None]
    if name == "scale":
        return dispatch(*mine, config, scale=0.3), shard(sdpa(q, k, v, scale=0.3), rank, size)
    if name == "mask of two dimensions":
        return dispatch(*mine, config, attn_mask=part), shard(sdpa(q, k, v, attn_mask=rows), rank, size)
    if name == "mask that is added":
        bias = torch.zeros(rows.shape).masked_fill(~rows, -1e4) + draw(*rows.shape)
        got = dispatch(*mine, config, attn_mask=bias.chunk(size, -1)[rank])
        return got, shard(sdpa(q, k, v, attn_mask=bias), rank, size)
    if name == "mask for each head":
        bias = draw(1, HEADS, 1, SEQ, seed=9)
        got = dispatch(*mine, config, attn_mask=bias.chunk(size, -1)[rank])
        return got, shard(sdpa(q, k, v, attn_mask=bias), rank, size)
    if name == "mask that is all true":
        return dispatch(*mine, config, attn_mask=torch.ones_like(part)), shard(sdpa(q, k, v), rank, size)
    if name == "grouped queries":
        few = [whole(heads=2, seed=s) for s in (4, 5)]
        got = dispatch(mine[0], *(shard(x, rank, size) for x in few), config, enable_gqa=True)
        return got, shard(sdpa(q, *few, enable_gqa=True), rank, size)
    if name == "other keys, sharded":
        others = [whole(seq=12, seed=s) for s in (4, 5)]
        got = dispatch(mine[0], *(shard(x, rank, size) for x in others), config)
        return got, shard(sdpa(q, *others), rank, size)
    if name == "other keys, whole on every rank":
        others = [whole(seq=7, seed=s) for s in (4, 5)]
        return dispatch(mine[0], *others, config), shard(sdpa(q, *others), rank, size)
    if name == "cross-attention without a config":
        others = [whole(seq=7, seed=s) for s in (4, 5)]
        return dispatch(mine[0], *others, None), shard(sdpa(q, *others), rank, size)
    if name == "causal, dropout 0, without a config":
        return dispatch(q, k, v, None, is_causal=True), sdpa(q, k, v, is_causal=True)
    if name == "one output from another":
        got = dispatch(*mine, config) - dispatch(mine[1], mine[0], mine[2], config)
        return got, shard(sdpa(q, k, v) - sdpa(k, q, v), rank, size)
    if name == "uneven shards, handed over":
        q, k, v = (x[:, :31] for x in (q, k, v))
        mine = [x.tensor_split(size, dim=1)[rank] for x in (q, k, v)]
        config = parallel_config(size, ulysses_degree=size, ulysses_anything=True)
        return dispatch(*mine, config), sdpa(q, k, v).tensor_split(size, dim=1)[rank]
    raise KeyError(name)


CASES = [
    *("scale", "mask of two dimensions", "mask that is added", "mask for each head", "mask that is all true"),
    *("grouped queries", "other keys, sharded", "other keys, whole on every rank"),
    *("cross-attention without a config", "causal, dropout 0, without a config", "one output from another"),
    "uneven shards, handed over",
]


def check(rank, size, name):
    fa.enable()
    try:
        with torch.no_grad():
            got, want = case(name, rank, size)
        return (got - want).abs().max().item()
    finally:
        clean()


@pytest.mark.parametrize("name", CASES)
def test_call_equals_attention_of_one_process(ranks, name):
    assert max(ranks(2).run(check, name=name)) < 1e-5


def views(rank, size):
    """With copy=False the outputs share memory, as promised; by default they do not."""
    shared = []
    for copy in (False, True):
        fa.enable(copy=copy)
        config = parallel_config(size)
        mine = [shard(whole(seed=s), rank, size) for s in range(3)]
        with torch.no_grad():
            first, second = (dispatch(*mine, config) for _ in range(2))
        shared.append(first.data_ptr() == second.data_ptr())
        clean()
    return shared


def test_outputs_are_views_only_when_asked_for(ranks):
    assert ranks(2).run(views) == 2 * [[True, False]]


def refused(rank, size, name):
    fa.enable(timeout_s=20)
    mine = [shard(whole(seed=s), rank, size) for s in range(3)]
    config = parallel_config(size)
    options = {
        "causal": {"is_causal": True},
        "dropout": {"dropout_p": 0.1},
        "lse": {"attention_kwargs": {"return_lse": True}},
        "whole mask": {"attn_mask": keys_valid()},
        "mask of rows": {"attn_mask": torch.ones(1, 1, SEQ // size, SEQ // size, dtype=torch.bool)},
        "ring": {},
        "grad": {"attn_mask": shard(keys_valid(), rank, size)},
        "scale": {"scale": [0.5], "attn_mask": shard(keys_valid(), rank, size)},
        "no mask": {"attn_mask": [True]},
        "one rank's scale": {"attn_mask": shard(keys_valid(), rank, size), "scale": [0.5] if rank else 0.5},
        "one rank's mask": {"attn_mask": [True] if rank else shard(keys_valid(), rank, size)},
        "ranks differ": {"attn_mask": shard(keys_valid(), rank, size)[: None if rank else 1]},
    }[name]
    if name == "ring":
        config = parallel_config(size, ring_degree=size)
    if name == "grad":
        mine[0].requires_grad_()
    outcome = attempt(dispatch, *mine, config, **options)
    clean()
    return outcome


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("causal", "UnsupportedError", "the gathered order"),
        ("dropout", "UnsupportedError", "there is no backward"),
        ("lse", "UnsupportedError", "call fa_a2a.UlyssesAttention"),
        ("whole mask", "UnsupportedError", "shard it in the context-parallel plan"),
        ("mask of rows", "UnsupportedError", "covers this rank's 16 keys"),
        ("ring", "UnsupportedError", "on GPUs only"),
        ("grad", "UnsupportedError", "torch.no_grad()"),
        ("ranks differ", "PeerMismatchError", "rank 0"),
        ("scale", "ConfigurationError", "scale must be a finite number or None, got [0.5]"),
        ("no mask", "ShapeError", "a mask must be a tensor or None, got list"),
        ("one rank's scale", "PeerMismatchError", "scale must be a finite number"),
        ("one rank's mask", "PeerMismatchError", "a mask must be a tensor"),
    ],
)
def test_refused_on_every_rank(ranks, name, error, text):
    for outcome in ranks(2).run(refused, name=name):
        assert outcome.error == error and text in outcome.text and outcome.seconds < 15


def compiled(rank, size, name):
    """The repeated blocks compiled whole against the eager single-process model."""
    torch._dynamo.reset()
    warnings.simplefilter("ignore")
    model, inputs = build(name)
    want = forward(model, inputs)
    other = parallel(model, size)
    forward(other, inputs)  # diffusers' hooks read a signature in their first call, which Dynamo cannot trace
    other.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    try:
        return max((forward(other, inputs) - want).abs().max().item() for _ in range(2))
    finally:
        clean(other)
        torch._dynamo.reset()


@pytest.mark.parametrize("name", ["flux", "wan", "qwen_masked"])
def test_compiled_blocks(ranks, name):
    assert max(ranks(2).run(compiled, name=name, timeout_s=200)) < 1e-5


def said(rank, size):
    """How often a rank says that masked attention takes another way, in three layers."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fa_a2a").addHandler(handler)
    fa.enable()
    try:
        mine = [shard(whole(seed=s), rank, size) for s in range(3)]
        with torch.no_grad():
            for _ in range(3):
                dispatch(*mine, parallel_config(size), attn_mask=shard(keys_valid(), rank, size))
    finally:
        logging.getLogger("fa_a2a").removeHandler(handler)
        clean()
    return len([text for text in records if "fused path" in text])


def test_the_way_of_masked_calls_is_said_once(fresh_ranks):
    assert fresh_ranks(2).run(said) == [1, 1]


def warned(rank, size, backend_first):
    from diffusers import ContextParallelConfig

    fa.enable()
    model, inputs = build("flux")
    records, handler = [], logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fa_a2a").addHandler(handler)
    try:
        if backend_first:
            model.set_attention_backend("fa_a2a")
        fa.parallelize(model, ContextParallelConfig(ulysses_degree=size))
        if backend_first:
            forward(model, inputs)
    finally:
        logging.getLogger("fa_a2a").removeHandler(handler)
        clean(model)
    return [text for text in records if "does not attend through fa_a2a" in text]


def test_a_model_that_keeps_its_own_attention_is_told(ranks):
    for text in ranks(2).run(warned, backend_first=False):
        assert text == [
            "FluxTransformer2DModel does not attend through fa_a2a: call model.set_attention_backend('fa_a2a') before "
            "parallelize"
        ]
    assert ranks(2).run(warned, backend_first=True) == [[], []]
