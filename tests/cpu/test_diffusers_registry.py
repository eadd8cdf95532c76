"""The backend comes into diffusers and leaves it without a trace; what cannot come in is refused."""

import pytest
import torch

pytest.importorskip("diffusers")
from fa_a2a.bench import dit_models
from fa_a2a.errors import FaA2AError, UnsupportedError
from fa_a2a.integrations import diffusers as fa

CASE = dit_models.Case("qwen", 64, 64, text=8, tiny=True)


def build():
    return dit_models.make(CASE, torch.device("cpu"), torch.float32)


def state():
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    tables = ("_backends", "_constraints", "_supported_arg_names", "_supports_context_parallel")
    kept = {name: set(getattr(_AttentionBackendRegistry, name)) for name in tables}
    names = {name: list(getattr(AttentionBackendName, name)) for name in ("_member_names_", "_value2member_map_")}
    return kept, names, sorted(vars(AttentionBackendName)), _AttentionBackendRegistry._active_backend


def test_disable_leaves_diffusers_as_it_was():
    from diffusers.hooks.context_parallel import logger

    before, methods = state(), dict(vars(logger))
    for _ in range(2):
        fa.enable()
        fa.enable(kernel="cpu")
        model, _ = build()
        model.set_attention_backend("fa_a2a")
        assert state() != before
        fa.disable()
        fa.disable()
        assert state() == before and dict(vars(logger)) == methods
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("fa_a2a")


def test_the_backend_without_parallelism_is_local_attention():
    model, inputs = build()
    mask = torch.arange(8)[None] < 5
    fa.enable()
    try:
        outs = []
        for backend in ("native", "fa_a2a"):
            model.set_attention_backend(backend)
            with torch.no_grad():
                outs.append(model(**inputs, encoder_hidden_states_mask=mask)[0])
        assert torch.equal(*outs)
    finally:
        fa.disable()


def test_other_versions_are_refused(monkeypatch):
    import diffusers

    monkeypatch.setattr(diffusers, "__version__", "0.43.0")
    with pytest.raises(UnsupportedError, match=r"with version 0[.]42[.]1; this is 0[.]43[.]0"):
        fa.enable()


def test_bad_options_are_refused():
    with pytest.raises(FaA2AError, match="kernel must be"):
        fa.enable(kernel="fast")


def test_a_model_without_a_plan_is_refused():
    from diffusers import ContextParallelConfig, PixArtTransformer2DModel

    model = PixArtTransformer2DModel(num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=8)
    with pytest.raises(UnsupportedError, match="no context-parallel plan"):
        fa.parallelize(model, ContextParallelConfig(ulysses_degree=2))
