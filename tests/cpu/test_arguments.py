"""Every argument of the public interface with wrong types and odd values: one clear error, the same when compiled."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fa_a2a
from fa_a2a import HeadShards, NormRope, UlyssesAttention, attention_gather, scatter_heads
from fa_a2a.errors import ConfigurationError, FaA2AError, GroupError, ShapeError, UnsupportedError

WEIGHT = torch.ones(16)
NAN, INF = float("nan"), float("inf")


class Hostile:
    """No method that an argument might be asked for works."""

    def __eq__(self, other):
        raise TypeError("cannot compare")

    __hash__ = None


SPARSE, NESTED = object(), object()
NO_FLAGS = [1, 0, None, "yes", [], np.bool_(True), torch.tensor(True)]
NO_NUMBERS = [True, "big", [0.5], NAN, INF, -INF, 10**400, 1j, np.float32("nan"), torch.tensor(0.5)]
NO_INTEGER_LISTS = [8, "8", [], [8.0], [True], [NAN], {24}, Hostile(), np.array([24])]
NO_DEADLINES = [True, 0, -1, "soon", [30], NAN, INF, 1e10, 10**400, np.float16("inf"), torch.tensor(30.0), Hostile()]
NO_NAMES = ["fa9", "", None, 4, ["cpu"], {"cpu": 1}, np.array(["cpu", "fa4"]), Hostile()]
NO_ROWS = [True, 1.0, "2", [2], NAN, torch.tensor(2), np.float64(2)]
CALL = {  # of scatter_heads, from_tensors and the layer
    "scale": (ConfigurationError, NO_NUMBERS),
    "return_lse": (ConfigurationError, NO_FLAGS),
    "causal": (ConfigurationError, NO_FLAGS),
    "key_lengths": (ShapeError, [*NO_INTEGER_LISTS, [0, 24], [25, 24], [10**30, 1], [24], torch.tensor([1.0, 1.0])]),
    "shard_sizes": (ShapeError, [*NO_INTEGER_LISTS, [0], [-24], [23], [10**30], [12, 12], torch.tensor([24])]),
    "replicated_text": ((ConfigurationError, ShapeError), [*NO_ROWS, 24, -24, 10**30]),
}
CHOICES = {"kernel": NO_NAMES, "exchange": NO_NAMES, "timeout_s": NO_DEADLINES}
LAYER = {
    "whole_kv": (ConfigurationError, NO_FLAGS),
    "norm_rope": (ConfigurationError, [True, "rms", WEIGHT, (WEIGHT, WEIGHT)]),
}


def flat(table):
    return [
        pytest.param(name, kind, bad, id=f"{name}-{i}")
        for name, (kind, all_) in table.items()
        for i, bad in enumerate(all_)
    ]


@pytest.fixture(scope="module", autouse=True)
def alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    torch.set_num_threads(threads)
    fa_a2a.close()
    dist.destroy_process_group()


def inputs(seq=24):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, seq, 4, 16, generator=generator) for _ in range(3)]


def error_of(call, *args, **options):
    """The error, after the same call with good options has been settled: 1 is not to pass for a known True."""
    with pytest.raises(FaA2AError) as caught:
        call(*args, **options)
    return caught.value


@pytest.mark.parametrize(("name", "kind", "bad"), flat(CALL))
@pytest.mark.parametrize("call", [scatter_heads, HeadShards.from_tensors, UlyssesAttention()])
def test_of_a_call(call, name, kind, bad):
    for flag in (True, False):
        call(*inputs(), **{name: flag} if kind is ConfigurationError and name != "scale" else {})
    error = error_of(call, *inputs(), **{name: bad})
    assert isinstance(error, kind) and (name in str(error) or "q, k and v hold the replicated text" in str(error))


@pytest.mark.parametrize(("name", "kind", "bad"), flat(LAYER))
@pytest.mark.parametrize("call", [scatter_heads, UlyssesAttention()])
def test_of_the_whole_layer(call, name, kind, bad):
    error = error_of(call, *inputs(), **{name: bad})
    assert type(error) is kind and name in str(error)


@pytest.mark.parametrize(("name", "kind", "bad"), flat({n: (ConfigurationError, all_) for n, all_ in CHOICES.items()}))
@pytest.mark.parametrize(
    "call", [scatter_heads, HeadShards.from_tensors, lambda *_, **options: UlyssesAttention(**options)]
)
def test_choices(call, name, kind, bad):
    if bad is None and name == "timeout_s":
        return
    error = error_of(call, *inputs(), **{name: bad})
    assert type(error) is kind and f"{name} must be" in str(error)


@pytest.mark.parametrize("bad", NO_FLAGS)
def test_copy(bad):
    assert "copy must be True or False" in str(error_of(UlyssesAttention, copy=bad))
    assert "copy must be True or False" in str(error_of(attention_gather, scatter_heads(*inputs()), copy=bad))


@pytest.mark.parametrize("bad", NO_DEADLINES)
def test_deadlines_of_gather_and_close(bad):
    for call, args in ((attention_gather, (scatter_heads(*inputs()),)), (fa_a2a.close, ())):
        assert "timeout_s must be a positive number" in str(error_of(call, *args, timeout_s=bad))


def test_of_a_huge_value_the_beginning_is_quoted():
    text = str(error_of(scatter_heads, *inputs(), key_lengths=[0.5] * 10**6))
    assert "key_lengths must be a list of integers, got [0.5, 0.5" in text and len(text) < 400


def test_a_wrong_deadline_is_quoted_as_it_was_written():
    assert "got '30'" in str(error_of(UlyssesAttention, timeout_s="30"))


@pytest.mark.parametrize("bad", ["cuda:0", 0, [torch.device("cpu")]])
def test_device_of_initialize(bad):
    assert "device must be a torch.device" in str(error_of(fa_a2a.initialize, bad))


@pytest.mark.parametrize("name", ["cuda:99", "meta"])
def test_initialize_of_a_device_that_is_not_here(name):
    error = error_of(fa_a2a.initialize, torch.device(name))
    assert type(error) is ConfigurationError and f"got {name}" in str(error)


@pytest.mark.parametrize("bad", [7, [0, 1], (), {"a": 1}, NAN, np.int64(0), True])
def test_group(bad):
    for call in (scatter_heads, UlyssesAttention(bad)):
        args = (*inputs(), bad) if call is scatter_heads else inputs()
        assert isinstance(error_of(call, *args), GroupError)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("bad", [None, 1.0, "q", [[1.0]], np.ones((2, 24, 4, 16)), WEIGHT, SPARSE, NESTED])
def test_tensors(bad, place):
    qkv = inputs()
    if bad is SPARSE:
        bad = qkv[place].to_sparse()
    elif bad is NESTED:
        bad = torch.nested.nested_tensor(list(qkv[place]), layout=torch.jagged)
    qkv[place] = bad
    for call in (scatter_heads, HeadShards.from_tensors, UlyssesAttention()):
        error = error_of(call, *qkv)
        assert isinstance(error, ShapeError) and f"{'qkv'[place]} must be a" in str(error)


NORM = {
    "eps": [True, "1", [1e-6], NAN, INF, -1e-6, 10**400, torch.tensor(1e-6)],
    "interleaved": [1, None, "yes", []],
    "q_weight": [1.0, [1.0] * 16, np.ones(16), WEIGHT.double(), WEIGHT.int(), torch.ones(2, 16)],
    "cos": [1.0, WEIGHT, torch.ones(24, 16).to_sparse()],
}


@pytest.mark.parametrize(("name", "kind", "bad"), flat({name: (ShapeError, all_) for name, all_ in NORM.items()}))
def test_norm_rope(name, kind, bad):
    options = {"q_weight": WEIGHT, "k_weight": WEIGHT, name: bad}
    if name == "cos":
        options["sin"] = bad
    assert name in str(error_of(NormRope, **options))


def test_numbers_of_any_package_are_numbers():
    q, k, v = inputs()
    layer = UlyssesAttention(timeout_s=np.float32(30))
    want = layer(q, k, v, 0.25)
    for scale in (np.float32(0.25), np.float64(0.25), np.float16(0.25), Fraction(1, 4)):
        assert torch.equal(layer(q, k, v, scale), want)
    assert torch.equal(layer(q, k, v, 2), layer(q, k, v, np.int64(2)))
    norm = NormRope(WEIGHT, WEIGHT, eps=np.float32(1e-6))
    assert torch.allclose(layer(q, k, v, norm_rope=norm), layer(q, k, v, norm_rope=NormRope(WEIGHT, WEIGHT)))


def compiled(layer):
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, backend="eager")


NOT_TRACED = (np.ndarray, np.generic, Hostile, set, torch.Tensor, complex)  # or quoted otherwise


@pytest.mark.parametrize(
    ("name", "kind", "bad"), [x for x in flat(CALL | LAYER) if not isinstance(x.values[2], NOT_TRACED)]
)
def test_compiled_calls_are_refused_like_eager_ones(name, kind, bad):
    layer = UlyssesAttention()
    want = error_of(layer, *inputs(), **{name: bad})
    got = error_of(compiled(layer), *inputs(), **{name: bad})
    assert (type(got), str(got)) == (type(want), str(want))


@pytest.mark.parametrize(
    ("name", "bad"), [("scale", np.float32(1)), ("replicated_text", np.int64(1)), ("causal", np.bool_(1))]
)
def test_compiled_calls_say_that_numpys_numbers_are_not_plain(name, bad):
    assert name in str(error_of(compiled(UlyssesAttention()), *inputs(), **{name: bad}))


def norm(width=16):
    return {"norm_rope": NormRope(torch.ones(width), torch.ones(width))}


SPOILT = {
    "three dimensions": (ShapeError, lambda *qkv: ([t[0] for t in qkv], norm())),
    "grad": (UnsupportedError, lambda q, k, v: ((q.requires_grad_(), k, v), {})),
    "cross-attention that norms": (UnsupportedError, lambda *qkv: (qkv, norm() | {"whole_kv": True})),
    "other weights": (ShapeError, lambda *qkv: (qkv, norm(8))),
    "lengths that are no integers": (ShapeError, lambda *qkv: (qkv, {"key_lengths": torch.tensor([1.0, 2.0])})),
    "two dtypes": (ShapeError, lambda q, k, v: ((q, k.half(), v), {})),
    "no head_dim": (ShapeError, lambda *qkv: ([t[..., :0] for t in qkv], {})),
}


@pytest.mark.parametrize("name", SPOILT)
def test_compiled_calls_refuse_the_same_tensors(name):
    kind, spoil = SPOILT[name]
    args, options = spoil(*inputs())
    want, got = (error_of(layer, *args, **options) for layer in (UlyssesAttention(), compiled(UlyssesAttention())))
    assert type(want) is kind
    assert (type(got), str(got)) == (kind, str(want))


def test_compiled_calls_take_the_same_options():
    q, k, v = inputs()
    layer, few = UlyssesAttention(copy=True), [t[:, :, :2] for t in (k, v)]
    fast = compiled(layer)
    for options in (
        *({}, {"scale": 2}, {"scale": 0.3, "causal": True}, {"key_lengths": (24, 7)}, {"shard_sizes": (24,)}),
        *({"replicated_text": -3}, {"key_lengths": torch.tensor([3, 4], dtype=torch.uint8)}, {"whole_kv": True}),
    ):
        assert torch.equal(fast(q, *few, **options), layer(q, *few, **options)), options
