"""The torch.library operator and the layer in a group of one rank, and what they say where there is no group."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fa_a2a
from fa_a2a import HeadShards, UlyssesAttention, attention_gather, scatter_heads
from fa_a2a.errors import ConfigurationError, GroupError, ShapeError, UnsupportedError
from fa_a2a.ops import plan


@pytest.fixture
def alone():
    """A world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    fa_a2a.close()
    dist.destroy_process_group()


def inputs(dtype=torch.float32, seq=24):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, seq, 3, 16, generator=generator).to(dtype) for _ in range(3)]


def plain(q, k, v, scale=None):
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=scale).transpose(1, 2)


@pytest.mark.parametrize(
    "call", [UlyssesAttention(), scatter_heads, HeadShards.from_tensors, lambda *_: fa_a2a.close()]
)
def test_without_a_process_group_the_error_says_what_to_do(call):
    with pytest.raises(GroupError, match="init_process_group"):
        call(*inputs())


def test_initialize_without_a_process_group(monkeypatch):
    with pytest.raises((GroupError, UnsupportedError)):
        fa_a2a.initialize(torch.device("cuda", 0))


@pytest.mark.parametrize("exchange", ["auto", "collective", "fused"])
def test_one_rank_is_plain_attention(alone, exchange):
    q, k, v = inputs()
    layer = UlyssesAttention(exchange=exchange)
    out, lse = layer(q, k, v, scale=0.4, return_lse=True)
    assert torch.allclose(out, plain(q, k, v, 0.4), atol=1e-5)
    assert lse.shape == (2, 3, 24)
    assert layer.last_plan.reason == "a group of one rank exchanges nothing"
    assert fa_a2a.memory_bytes() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_operator_keeps_its_promises(alone, dtype, kernel):
    name = dist.group.WORLD.group_name
    for return_lse in (False, True) if kernel == "cpu" else (False,):
        args = (*inputs(dtype), name, kernel, "auto", 0.25, return_lse, 5.0)
        torch.library.opcheck(torch.ops.fa_a2a.ulysses_attention, args)


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_compiled_before_any_eager_call(alone, kernel):
    torch._dynamo.reset()
    q, k, v = inputs()
    compiled = torch.compile(UlyssesAttention(kernel=kernel), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v), plain(q, k, v), atol=1e-5)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.3])
@pytest.mark.parametrize("keys", [24, 7])
@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_any_scale_under_causal_and_padded_keys(alone, kernel, keys, scale):
    q, k, v = inputs(seq=24)
    out = UlyssesAttention(kernel=kernel)(q, k, v, scale, causal=True, key_lengths=[keys, 24])
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT * scale
    scores.masked_fill_(torch.ones(24, 24).triu(1).bool(), float("-inf"))
    scores[0, :, :, keys:] = float("-inf")
    assert torch.allclose(out.double(), (scores.softmax(-1) @ v).transpose(1, 2), atol=1e-5)


def test_numpys_integers_are_integers(alone):
    layer, whole = UlyssesAttention(), inputs()
    sizes, lengths = [np.int64(22)], list(np.array([24, 7]))
    out = layer(*whole, shard_sizes=sizes, replicated_text=np.int64(2), key_lengths=lengths)
    assert torch.equal(out, layer(*whole, key_lengths=[24, 7]))


def test_flash_attention_4_is_not_asked_for_scales_that_its_masks_cannot_bear():
    assert plan.scale_problem("fa4", 0.125) is None
    assert [plan.scale_problem(kernel, -0.125) for kernel in ("cpu", "torch", "fa3")] == [None] * 3
    for scale in (0.0, -0.125):
        assert f"takes a scale above 0, got {scale:g}" in plan.scale_problem("fa4", scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_autocast_changes_nothing(alone, dtype, kernel):
    q, k, v = inputs(dtype)
    layer = UlyssesAttention(kernel=kernel)
    norm = fa_a2a.NormRope(*torch.rand(2, 16), cos=torch.rand(24, 16), sin=torch.rand(24, 16))
    lse = [{"return_lse": True}] if kernel == "cpu" else []
    for options in ({}, {"causal": True}, {"key_lengths": [24, 7]}, {"norm_rope": norm}, *lse):
        want = layer(q, k, v, **options)
        for narrow in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", narrow):
                got = layer(q, k, v, **options)
            for a, b in zip(got if lse == [options] else [got], want if lse == [options] else [want]):
                assert a.dtype == b.dtype and torch.equal(a, b)


def test_error_leaves_the_group_usable(alone):
    q, k, v = inputs()
    with pytest.raises(ShapeError, match="k and v one shape"):
        scatter_heads(q, k[:, :-1], v)
    out, lse = attention_gather(scatter_heads(q, k, v, kernel="torch"))
    assert torch.allclose(out, plain(q, k, v), atol=1e-5)
    assert lse is None


def test_gradients_are_refused_unless_grad_mode_is_off(alone):
    q, k, v = inputs()
    q.requires_grad_()
    with pytest.raises(UnsupportedError, match=r"q requires grad.*no_grad"):
        UlyssesAttention()(q, k, v)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert not UlyssesAttention()(q, k, v).requires_grad


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kernel": "fa5"}, "kernel must be 'auto' or one of cpu, torch, fa4, fa3, got 'fa5'"),
        ({"kernel": None}, "kernel must be"),
        ({"exchange": "nccl"}, "exchange must be 'auto' or one of overlapped, fused, collective, got 'nccl'"),
        ({"timeout_s": 0}, "timeout_s must be a positive number of seconds, at most 1e.09, got 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be"),
        ({"timeout_s": "soon"}, "timeout_s must be"),
    ],
)
def test_options_are_checked_when_the_module_is_made(options, text):
    with pytest.raises(ConfigurationError, match=text):
        UlyssesAttention(**options)


def test_unknown_kernel_of_a_function_call(alone):
    with pytest.raises(ConfigurationError, match="kernel must be"):
        scatter_heads(*inputs(), kernel="fa5")


def test_fa4_on_cpu_tensors_names_the_reason(alone):
    with pytest.raises(UnsupportedError, match="'fa4' runs on NVIDIA GPUs, got cpu"):
        scatter_heads(*inputs(torch.bfloat16), kernel="fa4")


def test_one_rank_takes_every_option(alone):
    q, k, v = inputs()
    layer = UlyssesAttention()
    want = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
    assert torch.allclose(layer(q, k, v, causal=True, shard_sizes=[24]), want, atol=1e-5)
    assert torch.allclose(layer(q, k, v, replicated_text=7), plain(q, k, v), atol=1e-5)
    out = layer(q, k[:, :, :1], v[:, :, :1], key_lengths=[24, 5], whole_kv=True)
    few = [t[1:, :5, :1].expand(1, 5, 3, 16) for t in (k, v)]
    assert torch.allclose(out[1:], plain(q[1:], *few), atol=1e-5)


@pytest.mark.parametrize("group", ["no such group", 7, object()])
def test_not_a_group(alone, group):
    with pytest.raises(GroupError):
        scatter_heads(*inputs(), group)


def test_gather_takes_only_head_shards(alone):
    with pytest.raises(ShapeError, match="takes what scatter_heads returned, got tuple"):
        attention_gather(tuple(inputs()))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "large"])
def test_scale_must_be_a_finite_number(alone, scale):
    with pytest.raises(ConfigurationError, match="scale must be a finite number"):
        scatter_heads(*inputs(), scale=scale)


def test_module_has_no_state_and_says_what_it_is():
    layer = UlyssesAttention(kernel="cpu", timeout_s=5)
    assert not list(layer.parameters())
    assert not layer.state_dict()
    assert repr(layer) == "UlyssesAttention(kernel='cpu', exchange='auto', copy=False, timeout_s=5)"
