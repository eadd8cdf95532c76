"""The diffusion transformers that `fa-a2a dit` times: their published configurations, random weights, inputs.

diffusers is imported when a model is made. Weights are drawn on the device, in the dtype asked for, by the modules' own
initialisation: 20 B of them in seconds, and the same on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One model at one size. width and height in pixels; frames of video, 1 for an image; text in tokens."""

    model: str
    width: int
    height: int
    frames: int = 1
    text: int = 512
    rounds: int = 5
    tiny: bool = False  # a few narrow layers, for CPU processes

    @property
    def name(self) -> str:
        return f"{self.model} {self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens: a latent is 1/8 of a side and a token 2 x 2 of it; time is cut by 4."""
        return (self.frames - 1) // 4 + 1, self.height // 16, self.width // 16

    @property
    def image_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def joint_text(self) -> int:
        """Text tokens that take part in self-attention: Wan's text comes in by cross-attention."""
        return 0 if self.model == "wan" else self.text


@dataclass(frozen=True)
class Model:
    """kind: its class in diffusers; tiny: what differs from config in the small form."""

    kind: str
    config: dict[str, Any]
    tiny: dict[str, Any]
    inputs: Callable[[Case, dict[str, Any], Callable[..., torch.Tensor]], Inputs]


def _flux_inputs(case: Case, config: dict[str, Any], draw: Callable[..., torch.Tensor]) -> Inputs:
    _, rows, columns = case.grid
    image, text = draw(1, case.image_tokens, config["in_channels"]), draw(1, case.text, config["joint_attention_dim"])
    ids = torch.zeros(rows, columns, 3, device=image.device, dtype=image.dtype)
    ids[..., 1] += torch.arange(rows, device=image.device)[:, None]
    ids[..., 2] += torch.arange(columns, device=image.device)[None]
    return {
        "hidden_states": image,
        "encoder_hidden_states": text,
        "pooled_projections": draw(1, config["pooled_projection_dim"]),
        "timestep": torch.full((1,), 0.5, device=image.device, dtype=image.dtype),
        "img_ids": ids.view(-1, 3),
        "txt_ids": torch.zeros(case.text, 3, device=image.device, dtype=image.dtype),
        "guidance": torch.full((1,), 3.5, device=image.device, dtype=image.dtype),
    }


def _wan_inputs(case: Case, config: dict[str, Any], draw: Callable[..., torch.Tensor]) -> Inputs:
    frames, rows, columns = case.grid
    video = draw(1, config["in_channels"], frames, 2 * rows, 2 * columns)
    return {
        "hidden_states": video,
        "timestep": torch.full((1,), 500, device=video.device),
        "encoder_hidden_states": draw(1, case.text, config["text_dim"]),
    }


def _qwen_inputs(case: Case, config: dict[str, Any], draw: Callable[..., torch.Tensor]) -> Inputs:
    image = draw(1, case.image_tokens, config["in_channels"])
    return {
        "hidden_states": image,
        "encoder_hidden_states": draw(1, case.text, config["joint_attention_dim"]),
        "timestep": torch.full((1,), 0.5, device=image.device, dtype=image.dtype),
        "img_shapes": [[case.grid]],
    }


_NARROW = {"attention_head_dim": 32, "num_attention_heads": 4}
MODELS = {
    "flux": Model(  # FLUX.1-dev, 11.9 B
        "FluxTransformer2DModel",
        {
            **{"in_channels": 64, "num_layers": 19, "num_single_layers": 38, "guidance_embeds": True},
            **{"attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": (16, 56, 56)},
            **{"joint_attention_dim": 4096, "pooled_projection_dim": 768},
        },
        {
            **_NARROW,
            **{"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "axes_dims_rope": (8, 12, 12)},
            **{"joint_attention_dim": 32, "pooled_projection_dim": 16},
        },
        _flux_inputs,
    ),
    "wan": Model(  # Wan2.1-T2V-1.3B
        "WanTransformer3DModel",
        {
            **{"in_channels": 16, "out_channels": 16, "num_layers": 30, "ffn_dim": 8960, "text_dim": 4096},
            **{"attention_head_dim": 128, "num_attention_heads": 12, "cross_attn_norm": True},
            **{"qk_norm": "rms_norm_across_heads", "patch_size": (1, 2, 2)},
        },
        {**_NARROW, "num_layers": 2, "ffn_dim": 64, "text_dim": 32, "freq_dim": 32},
        _wan_inputs,
    ),
    "qwen": Model(  # Qwen-Image, 20 B
        "QwenImageTransformer2DModel",
        {
            **{"in_channels": 64, "out_channels": 16, "num_layers": 60, "joint_attention_dim": 3584},
            **{"attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": (16, 56, 56)},
        },
        {
            **_NARROW,
            **{"in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 32},
            "axes_dims_rope": (8, 12, 12),
        },
        _qwen_inputs,
    ),
}


def config(case: Case) -> dict[str, Any]:
    model = MODELS[case.model]
    return model.config | (model.tiny if case.tiny else {})


def make(case: Case, device: torch.device, dtype: torch.dtype, **changes: Any) -> tuple[Any, Inputs]:
    """The model in inference mode and one forward's inputs, the same numbers on every rank. changes: to its config."""
    import diffusers

    chosen = config(case) | changes
    torch.manual_seed(0)
    with device, _default_dtype(dtype):
        model = getattr(diffusers, MODELS[case.model].kind)(**chosen).requires_grad_(False)
    _let_attention_matter(model)
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    inputs = MODELS[case.model].inputs(case, chosen, draw)
    return model.eval(), {**inputs, "return_dict": False}


def _let_attention_matter(model: torch.nn.Module) -> None:
    """Makes the output depend on attention as a trained model's does.

    With the modules' own initialisation scores are so flat that attention is the mean over thousands of keys, about
    zero, and each of the linear layers behind it makes it smaller. A wrong exchange would hide in the rounding. With
    twice the norm's weight on q and k a few keys get most of a query's attention; weights of variance 1 / inputs keep
    its size.
    """
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.mul_(3**0.5)
        elif any(norm in name for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")):
            weight.mul_(2)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
