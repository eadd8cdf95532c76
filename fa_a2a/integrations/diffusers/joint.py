"""Joint attention over image and padded text: padding as key lengths, so that it takes the fused path.

A plan cuts text and image both, so in the gathered order padded text lies between the ranks' images, where no key
length reaches it. Here, in a forward whose text is padded, every rank holds the whole text beside its part of the image
(`replicated_text`); the text counts as the last tokens of the sequence, and the padded ones are at its end. That costs
each rank the text's rows, a few hundred of many thousands. So does text that does not divide over the ranks. Where
nothing is padded the mask is dropped and the text is cut as ever; where a mask has gaps, both stay, and attention takes
collectives (masked.py).

Which of these it is, is decided before each forward from the mask the model is given, the same on every rank like all
its inputs. The host reads a mask once for all layers and all steps (../host_reads.py), never inside a layer.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ...errors import ConfigurationError
from .. import host_reads

ATTRIBUTE = "fa_a2a_joint"  # of the parallel config that the processors hold

Arguments = dict[str, Any]


class Place(NamedTuple):
    """This rank's place along the sequence. uneven: of parts that need not be equal, as diffusers cuts them then."""

    size: int
    rank: int
    uneven: bool

    @staticmethod
    def of(model: Any) -> Place:
        context = model._parallel_config.context_parallel_config
        mesh = context._flattened_mesh
        return Place(mesh.size(), mesh.get_local_rank(), context.ulysses_anything or context.ring_anything)

    def part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of text. Raises ConfigurationError where the parts must be equal and are not."""
        if x.shape[dim] % self.size and not self.uneven:
            raise ConfigurationError(
                f"text must divide over the ranks, got {x.shape[dim]} rows over {self.size}; pad it, or give a mask "
                "without gaps"
            )
        return x.tensor_split(self.size, dim=dim)[self.rank]


class Joint:
    """What the attention of one forward is to know beside its tensors.

    answered: the model's mask needs no look any more. lengths: the keys of the whole sequence that take part, with
    text last; None: all. text: rows of text on every rank, n > 0 for the first n of a call's rows, n < 0 for the last;
    0: text is cut like the image, or there is none. is_on: whether this forward's attention heeds it.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.clear()

    def clear(self, answered: bool = False) -> None:
        self.answered, self.text = answered, 0
        self.lengths: tuple[int, ...] | None = None
        self.tensor: torch.Tensor | None = None

    def set(self, lengths: Iterable[int], text: int) -> None:
        self.answered, self.text = True, text
        self.lengths = tuple(lengths)
        self.tensor = torch.tensor(self.lengths)  # on the host, for torch.compile


def of(config: Any) -> Joint | None:
    """What a call under this parallel config has to heed; None without key lengths."""
    joint = getattr(config, ATTRIBUTE, None)
    return joint if joint is not None and joint.lengths is not None else None


def attach(model: Any, attentions: Iterable[Any], before: Callable[[Joint, Arguments], None]) -> Joint:
    """Gives these attention modules a Joint, which `before` sets by the model's arguments before each forward; it may
    change them."""
    joint, modules = Joint(), list(attentions)
    config = copy.copy(model._parallel_config)
    setattr(config, ATTRIBUTE, joint)
    for attention in modules:
        attention.processor._parallel_config = config
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def hook(module: Any, args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
        joint.clear()
        joint.is_on = not torch.compiler.is_compiling() and _is_ours(modules[0].processor, config)
        if not joint.is_on:  # a compiler cannot read a mask; other backends know no Joint
            return args, kwargs
        arguments = dict(zip(names, args)) | kwargs
        before(joint, arguments)
        return (), arguments

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return joint


def _is_ours(processor: Any, config: Any) -> bool:
    from .backend import owns_exchange

    return owns_exchange(processor._attention_backend, config.context_parallel_config)


def text_mask(
    joint: Joint, mask: object, text: object, images: int, ranks: int, text_first: bool, gaps: bool = False
) -> None:
    """Sets the Joint by text (batch, rows, channels), a mask over it (batch, rows) or None, and the number of image
    tokens; a mask that does not fit the text is the model's to refuse. gaps: the model takes the number of ones for a
    length, wherever they are."""
    if not isinstance(text, torch.Tensor) or text.dim() != 3:
        return
    batch, rows = text.shape[:2]
    counts = (rows,) * batch
    if mask is not None:
        found = host_reads.lengths(mask) if isinstance(mask, torch.Tensor) and mask.shape == (batch, rows) else None
        if found is None or not (found.are_first or gaps):
            return
        counts = found.counts
    if min(counts) == rows and rows % ranks == 0:
        joint.clear(answered=True)
    else:
        joint.set([images + count for count in counts], rows if text_first else -rows)


def cut_text(joint: Joint, module: Any, place: Place) -> None:
    """Cuts a block's encoder_hidden_states along the sequence, in forwards that do not keep the text whole."""
    at = list(inspect.signature(type(module).forward).parameters).index("encoder_hidden_states") - 1

    def hook(module: Any, args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
        if joint.text == 0:
            if "encoder_hidden_states" in kwargs:
                kwargs["encoder_hidden_states"] = place.part(kwargs["encoder_hidden_states"], 1)
            else:
                args = (*args[:at], place.part(args[at], 1), *args[at + 1 :])
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)
