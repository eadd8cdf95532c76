"""Masks whose key lengths the host reads: once for each mask, not once for each layer or step.

A mask is known again by identity and version, so one that is written to, or made anew, is read anew; so is one that was
made in inference mode, in every forward, since torch counts no versions of it. A CUDA graph holds
the lengths of its capture, which a replay with another mask would not follow: the capture must be watched, by
GraphedForward, which then refuses other values in the tensors that were read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigurationError


class Lengths(NamedTuple):
    """Of a mask (batch, keys): how many keys of each entry take part, and whether those are always the first ones."""

    counts: tuple[int, ...]
    are_first: bool


_known: MutableMapping[torch.Tensor, tuple[int | None, Lengths]] = WeakTensorKeyDictionary()  # mask: (version, Lengths)
_watch: dict[int, tuple[torch.Tensor, Lengths]] | None = None


def lengths(mask: torch.Tensor) -> Lengths | None:
    """What a mask of ones and zeros says, or None for another one. Waits for the mask's device if it is not known.

    Raises ConfigurationError in a capture that nobody watches."""
    if _watch is not None:
        if id(mask) not in _watch:
            _watch[id(mask)] = mask, _read(mask)
        found = _watch[id(mask)][1]
    else:
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                "a CUDA graph keeps the key lengths of the mask it was captured with; capture the model by "
                "fa_a2a.integrations.graph.GraphedForward, which refuses another mask"
            )
        version = None if mask.is_inference() else mask._version  # which inference tensors do not count
        if version is None or mask not in _known or _known[mask][0] != version:
            _known[mask] = version, _read(mask)
        found = _known[mask][1]
    return None if found.counts == () else found


def _read(mask: torch.Tensor) -> Lengths:
    """No counts for a mask that holds other values than ones and zeros."""
    ones = mask != 0
    falls = (ones[:, 1:] & ~ones[:, :-1]).any() if mask.shape[1] > 1 else ones.new_zeros(())
    foreign = (ones & (mask != 1)).any()
    first_is_off = ones.any(1).logical_and(~ones[:, 0]).any()
    numbers = torch.cat([ones.sum(1), torch.stack([falls | first_is_off, foreign]).long()])
    *counts, gaps, strange = numbers.tolist()  # one wait
    return Lengths(() if strange else tuple(counts), not gaps)


class Watch:
    """The masks that were read while it was open, and their static tensors' values since."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[torch.Tensor, Lengths]] = {}
        self._equal: MutableMapping[torch.Tensor, tuple[int | None, int]] = (
            WeakTensorKeyDictionary()
        )  # given: (version, static tensor's id)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        global _watch
        before, _watch = _watch, self._read
        try:
            yield
        finally:
            _watch = before

    def covers(self, mine: object) -> bool:
        return id(mine) in self._read

    def check_among(self, arguments: list[object]) -> None:
        """Raises ConfigurationError where a mask that was read is none of the arguments."""
        given = {id(x) for x in arguments}
        if any(key not in given for key in self._read):
            raise ConfigurationError(
                "the model read the key lengths of a mask that is none of GraphedForward's arguments, so a replay "
                "could not see it change; pass the mask itself"
            )

    def check_same(self, name: str, mine: torch.Tensor, given: torch.Tensor) -> None:
        """Raises ConfigurationError unless `given` holds what `mine` was captured with. Waits once for each value."""
        version = None if given.is_inference() else given._version
        if version is not None and given in self._equal and self._equal[given] == (version, id(mine)):
            return
        if not torch.equal(mine, given):
            raise ConfigurationError(
                f"{name} says which keys take part, and the graph holds the lengths it was captured with; capture "
                "another GraphedForward for another mask"
            )
        self._equal[given] = version, id(mine)
