"""Context parallelism for models that diffusers has no plan for: what is sharded where, and where it is gathered.

A plan says which arguments of which modules are cut along the sequence, so that everything between is done on a shard.
Text and image are cut both, so that every rank has as many tokens of each; the sequence of a joint attention is then
text 0, image 0, text 1, image 1, ... in the ranks' order. Three things no plan can say are done here:

  - SD3's and CogVideoX's attention calls torch's SDPA itself. It would attend to a shard; `redirected` sends that one
    call through diffusers' dispatcher.
  - HunyuanVideo's mask covers image and text in the order of the whole sequence; each attention is handed its shard's.
  - Z-Image refines image and text on every rank before the shards begin; attention there stays local.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigurationError, UnsupportedError
from .redirect import redirected

Plan = dict[str, Any]


@dataclass(frozen=True)
class _Recipe:
    """plan: of the model's modules. prepare: before, finish: after `enable_parallelism`."""

    plan: Callable[[Any], Plan]
    prepare: Callable[[Any], None] = lambda model: None
    finish: Callable[[Any], None] = lambda model: None


def parallelize(model: Any, config: Any) -> None:
    """`model.enable_parallelism(config=config)` for models with a plan in diffusers, and for those with one here:
    HunyuanVideo, SD3, CogVideoX and Z-Image (class names in `RECIPES`). Set the attention backend before.

    model: a diffusers transformer; config: ContextParallelConfig, or ParallelConfig with one. Each sharded length (of
    text, of image) must divide over the ranks; diffusers says so at the first forward otherwise.
    Between CPU processes this works, too, where `enable_parallelism` divides by the number of accelerators.
    Raises UnsupportedError for a model without a plan.
    """
    recipe = RECIPES.get(type(model).__name__)
    if getattr(model, "_cp_plan", None) is not None:
        recipe = _Recipe(lambda model: model._cp_plan)
    if recipe is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no context-parallel plan in diffusers, and there are plans here for "
            f"{', '.join(sorted(RECIPES))}; write one and call model.enable_parallelism(config=..., cp_plan=...)"
        )
    plan = recipe.plan(model)
    with _processes_count_as_devices():
        recipe.prepare(model)
        model.enable_parallelism(config=config, cp_plan=plan)
        recipe.finish(model)


@contextlib.contextmanager
def _processes_count_as_devices() -> Iterator[None]:
    """diffusers takes a rank's device modulo the number of accelerators, which is zero between CPU processes."""
    count = torch.accelerator.device_count
    if count():
        yield
        return
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = count


def _cut(dim: int, dims: int, output: bool = False) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelInput

    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=output)


def _joined() -> Any:
    from diffusers.models._modeling_parallel import ContextParallelOutput

    return ContextParallelOutput(gather_dim=1, expected_dims=3)


def _both_streams() -> Plan:
    return {"hidden_states": _cut(1, 3), "encoder_hidden_states": _cut(1, 3)}


def _hunyuan_video(model: Any) -> Plan:
    rope = {0: _cut(0, 2, output=True), 1: _cut(0, 2, output=True)}
    first = "transformer_blocks.0" if len(model.transformer_blocks) else "single_transformer_blocks.0"
    return {"rope": rope, first: _both_streams(), "proj_out": _joined()}


def _sd3(model: Any) -> Plan:
    return {"transformer_blocks.0": _both_streams(), "proj_out": _joined()}


def _cogvideox(model: Any) -> Plan:
    rope = {"image_rotary_emb": [_cut(0, 2), _cut(0, 2)]}
    return {"transformer_blocks.0": _both_streams(), "transformer_blocks.*": rope, "proj_out": _joined()}


def _z_image(model: Any) -> Plan:
    every = {"attn_mask": _cut(1, 2), "freqs_cis": _cut(1, 3)}
    final = {f"all_final_layer.{name}": _joined() for name in model.all_final_layer}
    return {"layers.0": {"x": _cut(1, 3)}, "layers.*": every, **final}


def _blocks(model: Any, *names: str) -> Iterator[Any]:
    for name in names:
        yield from getattr(model, name, None) or ()


def _redirect(model: Any) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    backend, _ = _AttentionBackendRegistry.get_active_backend()  # set_attention_backend passed these processors by
    for block in _blocks(model, "transformer_blocks"):
        for name in ("attn", "attn1", "attn2"):
            attention = getattr(block, name, None)
            if attention is not None:
                attention.set_processor(redirected(attention.processor))
                attention.processor._attention_backend = backend


def _shard_joint_masks(model: Any) -> None:
    context = model._parallel_config.context_parallel_config
    size, rank = context._flattened_mesh.size(), context._flattened_mesh.get_local_rank()

    def shard(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask, image, text = (kwargs[x] for x in ("attention_mask", "hidden_states", "encoder_hidden_states"))
        if mask is not None:
            images = image.shape[1] * size
            if mask.shape[-1] != images + text.shape[1] * size:
                raise ConfigurationError(
                    f"the mask must cover the whole sequence of image and text, "
                    f"{images} + {text.shape[1] * size} tokens, got {mask.shape[-1]}"
                )
            parts = (mask[..., :images], mask[..., images:])
            kwargs["attention_mask"] = torch.cat([x.chunk(size, dim=-1)[rank] for x in parts], dim=-1)
        return args, kwargs

    for block in _blocks(model, "transformer_blocks", "single_transformer_blocks"):
        block.attn.register_forward_pre_hook(shard, with_kwargs=True)


def _keep_refiners_local(model: Any) -> None:
    for block in _blocks(model, "noise_refiner", "context_refiner", "siglip_refiner"):
        block.attention.processor._parallel_config = None


RECIPES = {
    "HunyuanVideoTransformer3DModel": _Recipe(_hunyuan_video, finish=_shard_joint_masks),
    "SD3Transformer2DModel": _Recipe(_sd3, prepare=_redirect),
    "CogVideoXTransformer3DModel": _Recipe(_cogvideox, prepare=_redirect),
    "ZImageTransformer2DModel": _Recipe(_z_image, finish=_keep_refiners_local),
}
