"""Context parallelism for models that diffusers has no plan for: what is sharded where, and where it is gathered.

A plan says which arguments of which modules are cut along the sequence, so that everything between is done on a shard.
Text and image are cut both, so that every rank has as many tokens of each; the sequence of a joint attention is then
text 0, image 0, text 1, image 1, ... in the ranks' order. Four things no plan can say are done here:

  - QwenImage's and HunyuanVideo's text is not cut in forwards whose text is padded, and Z-Image's lengths are known
    where it joins text and image: so their masks become key lengths (joint.py).
  - SD3's and CogVideoX's attention calls torch's SDPA itself. It would attend to a shard; `redirected` sends that one
    call through diffusers' dispatcher.
  - HunyuanVideo's mask covers image and text in the order of the whole sequence; each attention is handed its shard's.
  - Z-Image refines image and text on every rank before the shards begin; attention there stays local.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigurationError, UnsupportedError
from . import joint, registry
from .backend import NAME, is_ours
from .redirect import redirected

Plan = dict[str, Any]
log = logging.getLogger("fa_a2a")


@dataclass(frozen=True)
class _Recipe:
    """plan: of the model's modules. prepare: before, finish: after `enable_parallelism`."""

    plan: Callable[[Any], Plan]
    prepare: Callable[[Any], None] = lambda model: None
    finish: Callable[[Any], None] = lambda model: None


def parallelize(model: Any, config: Any) -> None:
    """`model.enable_parallelism(config=config)` for models with a plan in diffusers, and for those with one here:
    HunyuanVideo, SD3, CogVideoX and Z-Image (class names in `RECIPES`). Set the attention backend before; a warning
    says so where `enable` was called and diffusers' own attention is left.

    model: a diffusers transformer; config: ContextParallelConfig, or ParallelConfig with one. Each sharded length (of
    text, of image) must divide over the ranks; an error says so at the first forward otherwise. Text of QwenImage and
    HunyuanVideo may have any length: what is padded or does not divide is not cut, and its mask, read by the host once,
    becomes key lengths.
    Between CPU processes this works, too, where `enable_parallelism` divides by the number of accelerators.
    Raises ConfigurationError for a config of another kind, UnsupportedError for a model without a plan. A deep copy of
    the model raises ConfigurationError when called.
    """
    from diffusers import ContextParallelConfig, ParallelConfig

    if not isinstance(config, ContextParallelConfig | ParallelConfig):
        raise ConfigurationError(f"config is a diffusers ContextParallelConfig(ulysses_degree=P), got {config!r:.200}")
    recipe = RECIPES.get(type(model).__name__)
    if recipe is None and getattr(model, "_cp_plan", None) is not None:
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
    _refuse_copies(model)
    if registry.is_enabled() and not _takes_ours(model):
        log.warning(
            "%s does not attend through fa_a2a: call model.set_attention_backend(%r) before parallelize",
            type(model).__name__,
            NAME,
        )


def _takes_ours(model: Any) -> bool:
    """Whether one of the model's attentions names the backend, or the active one is it."""
    processors = (getattr(module, "processor", None) for module in model.modules())
    return is_ours(None) or any(is_ours(getattr(p, "_attention_backend", None)) for p in processors)


_ORIGINAL = "_fa_a2a_original"


def _refuse_copies(model: Any) -> None:
    """Hooks, diffusers' and those here, hold the modules they were put on. In a deep copy they would go on running the
    original's blocks, with its weights and with the mask of another forward."""
    mark = object()  # which a deep copy has another of, and a shallow one, whose modules are the same, has too
    setattr(model, _ORIGINAL, mark)

    def hook(module: Any, args: Any) -> None:
        if getattr(module, _ORIGINAL, None) is not mark:
            raise ConfigurationError(
                "this is a deep copy of a model that was parallelized, and its hooks would run the original's blocks; "
                "copy the model first, then parallelize each copy"
            )

    model.register_forward_pre_hook(hook, prepend=True)


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
    return {"rope": rope, first: {"hidden_states": _cut(1, 3)}, "proj_out": _joined()}


def _qwen_image(model: Any) -> Plan:
    """diffusers' plan but for the text, which `_pad_qwen_image` cuts."""
    plan = {name: dict(part) if isinstance(part, dict) else part for name, part in model._cp_plan.items()}
    del plan["transformer_blocks.0"]["encoder_hidden_states"], plan["pos_embed"][1]
    return plan


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


def _pad_qwen_image(model: Any) -> None:
    place = joint.Place.of(model)

    def before(padded: joint.Joint, given: dict[str, Any]) -> None:
        mask = given.get("encoder_hidden_states_mask")
        images = given["hidden_states"].shape[1]
        joint.text_mask(padded, mask, given.get("encoder_hidden_states"), images, place.size, text_first=True)
        if padded.answered:
            given["encoder_hidden_states_mask"] = None

    def cut_angles(module: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> Any:
        image, text = output
        return image, text if padded.text else place.part(text, 0)

    padded = joint.attach(model, (block.attn for block in model.transformer_blocks), before)
    joint.cut_text(padded, model.transformer_blocks[0], place)
    model.pos_embed.register_forward_hook(cut_angles)


def _shard_joint_masks(model: Any) -> None:
    place = joint.Place.of(model)
    patch, patch_t = model.config.patch_size, model.config.patch_size_t
    blocks = list(_blocks(model, "transformer_blocks", "single_transformer_blocks"))

    def before(padded: joint.Joint, given: dict[str, Any]) -> None:
        frames, height, width = given["hidden_states"].shape[2:]
        images = (frames // patch_t) * (height // patch) * (width // patch)
        mask, text = given.get("encoder_attention_mask"), given.get("encoder_hidden_states")
        joint.text_mask(padded, mask, text, images, place.size, text_first=False, gaps=True)

    def shard(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask, image, text = (kwargs[x] for x in ("attention_mask", "hidden_states", "encoder_hidden_states"))
        if padded.answered:
            kwargs["attention_mask"] = None
        elif mask is not None:
            images, texts = image.shape[1] * place.size, text.shape[1] * place.size
            if mask.shape[-1] != images + texts:
                raise ConfigurationError(
                    f"the mask must cover the whole sequence of image and text, {images} + {texts} tokens, got "
                    f"{mask.shape[-1]}"
                )
            kwargs["attention_mask"] = torch.cat([place.part(x, -1) for x in mask.split([images, texts], -1)], dim=-1)
        return args, kwargs

    padded = joint.attach(model, (block.attn for block in blocks), before)
    joint.cut_text(padded, blocks[0], place)
    for block in blocks:
        block.attn.register_forward_pre_hook(shard, with_kwargs=True)


def _finish_z_image(model: Any) -> None:
    """Refiners stay local. The lengths of text and image together are known on the host where the model joins them,
    and padding is at the end of the sequence."""
    padded = joint.attach(model, (block.attention for block in model.layers), lambda padded, given: None)
    build, signature = model._build_unified_sequence, inspect.signature(model._build_unified_sequence)

    def joined(*args: Any, **kwargs: Any) -> Any:
        unified, angles, mask, noise = build(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if mask is not None and padded.is_on:
            parts = (given[f"{name}_seqlens"] for name in ("x", "cap", "siglip"))
            padded.set([sum(lengths) for lengths in zip(*filter(None, parts), strict=True)], 0)
            mask = None
        return unified, angles, mask, noise

    model._build_unified_sequence = joined
    for block in _blocks(model, "noise_refiner", "context_refiner", "siglip_refiner"):
        block.attention.processor._parallel_config = None


RECIPES = {
    "HunyuanVideoTransformer3DModel": _Recipe(_hunyuan_video, finish=_shard_joint_masks),
    "SD3Transformer2DModel": _Recipe(_sd3, prepare=_redirect),
    "CogVideoXTransformer3DModel": _Recipe(_cogvideox, prepare=_redirect),
    "QwenImageTransformer2DModel": _Recipe(_qwen_image, finish=_pad_qwen_image),
    "ZImageTransformer2DModel": _Recipe(_z_image, finish=_finish_z_image),
}
