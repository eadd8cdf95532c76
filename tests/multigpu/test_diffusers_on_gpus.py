"""diffusers models on real GPUs: the fused path, masks, a graph of the whole forward, compiled blocks."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("diffusers")
from fa_a2a import config
from fa_a2a.bench import dit_models
from fa_a2a.comm.group import resolve
from fa_a2a.errors import ConfigurationError
from fa_a2a.integrations import diffusers as fa
from fa_a2a.integrations.graph import GraphedForward
from fa_a2a.ops.kernel_choice import BEST_KNOWN

WIDER = {"attention_head_dim": 128, "num_attention_heads": 8}  # what the fused kernel takes
CHANGES = {name: WIDER | {"axes_dims_rope": (16, 56, 56)} for name in ("flux", "qwen")}


def models(name, device, **extra):
    """(single model, its twin on all ranks, inputs)."""
    from diffusers import ContextParallelConfig

    case = dit_models.Case(name, 512, 512, frames=5 if name == "wan" else 1, text=64, tiny=True)
    single, inputs = dit_models.make(case, device, torch.bfloat16, **CHANGES.get(name, WIDER))
    tensors = itertools.chain(single.parameters(), single.buffers())
    fa.enable()
    several = copy.deepcopy(single, {id(x): x for x in tensors})
    several.set_attention_backend("fa_a2a")
    fa.parallelize(several, ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    return single, several, inputs | extra


def run(model, inputs):
    with torch.inference_mode():
        return model(**inputs)[0].clone()


@pytest.fixture
def backend(device):
    yield device
    fa.disable()


def close(got, want):
    """bfloat16 through two to four layers; a wrong exchange is off by about the output itself."""
    return (got.float() - want.float()).abs().max() <= 0.05 * want.float().abs().max()


@pytest.mark.parametrize("name", ["flux", "wan", "qwen"])
def test_equals_one_gpu_on_the_fused_path(backend, name):
    single, several, inputs = models(name, backend)
    want = run(single, inputs)
    for _ in range(2):
        assert close(run(several, inputs), want)
    plans = list(resolve(None).plans.values())
    assert {plan.kernel for plan in plans} <= set(BEST_KNOWN) and {plan.exchange for plan in plans} == {"fused"}


def test_mask_over_padded_text(backend):
    mask = torch.arange(64, device=backend)[None] < 41
    single, several, inputs = models("qwen", backend, encoder_hidden_states_mask=mask)
    want = run(single, inputs)
    assert close(run(several, inputs), want)
    changed = inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"].masked_fill(~mask[..., None], 7.0)}
    assert close(run(several, changed), want)  # what is masked takes no part
    images = inputs["hidden_states"].shape[1]
    assert {p.exchange for p in resolve(None).plans.values() if p.request.key_lengths == (images + 41,)} == {"fused"}


def test_a_graph_keeps_the_mask_it_was_captured_with(backend):
    mask = torch.arange(64, device=backend)[None] < 41
    _, several, inputs = models("qwen", backend, encoder_hidden_states_mask=mask)
    graphed = GraphedForward(several, **inputs)
    assert torch.equal(graphed(**inputs)[0].clone(), run(several, inputs))
    assert torch.equal(
        graphed(**inputs | {"encoder_hidden_states_mask": mask.clone()})[0].clone(), run(several, inputs)
    )
    with pytest.raises(ConfigurationError, match="which keys take part"):
        graphed(**inputs | {"encoder_hidden_states_mask": mask.roll(1, 1)})


@pytest.mark.skipif(config.share_gpu(), reason="gloo's collectives cannot be captured")
@pytest.mark.parametrize("name", ["flux", "wan", "qwen"])
def test_graph_of_the_whole_forward_takes_new_inputs(backend, name):
    _, several, inputs = models(name, backend)
    graphed = GraphedForward(several, **inputs)
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = inputs | {"hidden_states": torch.randn_like(inputs["hidden_states"])}
        dist.broadcast(fresh["hidden_states"], 0)
        got = graphed(**fresh)[0].clone()
        assert torch.equal(got, run(several, fresh))


def test_compiled_blocks(backend):
    single, several, inputs = models("flux", backend)
    several.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    want = run(single, inputs)
    for _ in range(2):
        assert close(run(several, inputs), want)
