"""Tiny diffusion transformers and what the ranks of a test do with them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

import fa_a2a
from fa_a2a.bench import dit_models
from fa_a2a.integrations import diffusers as fa

TEXT = 16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lengths(*valid: int) -> torch.Tensor:
    """(batch, TEXT) boolean, the first `valid` of each true."""
    return torch.arange(TEXT)[None] < torch.tensor(valid)[:, None]


def of_bench(name: str, frames: int = 1, batch: int = 1, **extra: Any) -> tuple[Any, dict[str, Any]]:
    case = dit_models.Case(name, 64, 96, frames=frames, text=TEXT, tiny=True)
    model, inputs = dit_models.make(case, torch.device("cpu"), torch.float32)
    if batch > 1:
        inputs = {n: torch.cat([x, x.flip(1)]) if torch.is_tensor(x) and x.dim() == 3 else x for n, x in inputs.items()}
    return model, inputs | extra


def qwen_masked() -> tuple[Any, dict[str, Any]]:
    """Two prompts of different lengths, and holes in one of them."""
    mask = lengths(TEXT - 5, 7)
    mask[0, 2] = False
    return of_bench("qwen", batch=2, encoder_hidden_states_mask=mask)


def qwen_padded(*valid: int) -> tuple[Any, dict[str, Any]]:
    """Two prompts of different lengths."""
    return of_bench("qwen", batch=2, encoder_hidden_states_mask=lengths(*valid))


def odd_text(model: Any, inputs: dict[str, Any], mask: str = "") -> tuple[Any, dict[str, Any]]:
    """A row of text less, so that it divides over no ranks; with a mask of ones, or none."""
    text = inputs["encoder_hidden_states"][:, :-1]
    masks = {mask: torch.ones(text.shape[:2], dtype=torch.long)} if mask else {}
    return model, inputs | {"encoder_hidden_states": text} | masks


def hunyuan_video() -> tuple[Any, dict[str, Any]]:
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        **{"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16},
        **{"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 16},
        **{"pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6)},
    )
    inputs = {
        **{"hidden_states": draw(2, 4, 2, 8, 8), "timestep": torch.tensor([10, 20])},
        **{"encoder_hidden_states": draw(2, TEXT, 16), "encoder_attention_mask": lengths(TEXT - 3, 5).long()},
        **{"pooled_projections": draw(2, 8), "guidance": torch.tensor([3000.0, 1000.0])},
    }
    return model, inputs


def sd3() -> tuple[Any, dict[str, Any]]:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        **{"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16},
        **{"num_attention_heads": 4, "joint_attention_dim": 16, "caption_projection_dim": 64},
        **{"pooled_projection_dim": 8, "pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
    )
    inputs = {"hidden_states": draw(1, 4, 16, 16), "encoder_hidden_states": draw(1, TEXT, 16)}
    return model, inputs | {"pooled_projections": draw(1, 8), "timestep": torch.tensor([10])}


def cogvideox() -> tuple[Any, dict[str, Any]]:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        **{"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2},
        **{"text_embed_dim": 16, "sample_width": 8, "sample_height": 8, "sample_frames": 5, "time_embed_dim": 8},
        **{"max_text_seq_length": TEXT, "use_rotary_positional_embeddings": True},
    )
    angles = draw(2 * 16, 16, seed=3)
    inputs = {"hidden_states": draw(1, 2, 4, 8, 8), "encoder_hidden_states": draw(1, TEXT, 16)}
    return model, inputs | {"timestep": torch.tensor([10]), "image_rotary_emb": (angles.cos(), angles.sin())}


def z_image() -> tuple[Any, dict[str, Any]]:
    """Two captions of different lengths: the shorter one's sequence is padded behind a mask."""
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(
        **{"in_channels": 4, "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4},
        **{"cap_feat_dim": 16, "axes_dims": [4, 6, 6], "axes_lens": [256, 32, 32]},
    )
    inputs = {"x": [draw(4, 1, 12, 16), draw(4, 1, 12, 16, seed=1)], "t": torch.tensor([0.3, 0.6])}
    return model, inputs | {"cap_feats": [draw(20, 16), draw(40, 16, seed=1)]}


MODELS = {
    "flux": lambda: of_bench("flux"),
    "wan": lambda: of_bench("wan", frames=5),
    "qwen": lambda: of_bench("qwen"),
    **{"qwen_masked": qwen_masked, "hunyuan_video": hunyuan_video, "sd3": sd3, "cogvideox": cogvideox},
    "z_image": z_image,
    "qwen_padded": lambda: qwen_padded(TEXT - 5, 7),
    "qwen_unpadded": lambda: qwen_padded(TEXT, TEXT),
    "qwen_odd": lambda: odd_text(*of_bench("qwen")),
    "qwen_odd_mask": lambda: odd_text(*of_bench("qwen", batch=2), "encoder_hidden_states_mask"),
    "hunyuan_odd": lambda: odd_text(*hunyuan_video(), "encoder_attention_mask"),
}


def build(name: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval().requires_grad_(False), inputs | {"return_dict": False}


def twin(model: Any) -> Any:
    """A copy that shares the weights."""
    return copy.deepcopy(model, {id(x): x for x in itertools.chain(model.parameters(), model.buffers())})


def forward(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        (out,) = model(**inputs)
    return torch.stack(list(out)) if isinstance(out, (list, tuple)) else out


def parallel(model: Any, size: int, mesh: Any = None, **options: Any) -> Any:
    """A twin of the model on `size` ranks, the axis of a mesh where one is given, with the backend."""
    from diffusers import ContextParallelConfig

    fa.enable(**options)
    other = twin(model)
    other.set_attention_backend("fa_a2a")
    fa.parallelize(other, ContextParallelConfig(ulysses_degree=size, mesh=mesh))
    return other


def clean(model: Any = None) -> None:
    if model is not None:
        model.reset_attention_backend()
    fa.disable()
    fa_a2a.close()
