"""The options of `fa-a2a dit`, and what they start. Imports no torch before a measurement runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, ShapeError
from . import checks

if TYPE_CHECKING:
    from .dit_models import Case

# Qwen-Image's 1328 x 1328 makes 83 x 83 tokens, which divide over no number of ranks; 1664 x 928 is another of its own
# sizes and divides over 8.
DEFAULT = ("flux:1024x1024", "flux:2048x2048", "wan:832x480x81", "qwen:1664x928")
_ON_CPU = ("flux:128x128", "wan:64x96x5", "qwen:128x128")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="MODEL:WIDTHxHEIGHT[xFRAMES]",
        help=f"flux, wan or qwen, at a size in pixels; by default {' '.join(DEFAULT)}, on CPUs small ones",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="cuda where there is a GPU; cpu: narrow models, a check"
    )
    parser.add_argument(
        "--ranks", type=checks.counts, help="2,4,8 by default as far as there are GPUs, on CPUs 2,4; or torchrun's"
    )
    parser.add_argument("--text", type=int, help="text tokens; 512, on CPUs 32")
    parser.add_argument("--modes", help="eager, graph or both as eager,graph, the default; on CPUs eager")
    parser.add_argument("--rounds", type=int, help="timed rounds; 5, on CPUs 1")
    parser.add_argument(
        "--check", action="store_true", help="fa_a2a's outputs against one GPU's, no times: ranks may share a GPU"
    )
    checks.add_out(parser, "dit")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from .. import config
    from ..integrations import diffusers as integration
    from . import dit, launch, main

    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda needs a GPU, and torch sees none; leave it out to use CPU processes")
    timed = not arguments.check
    counts = main.rank_counts(arguments.ranks, kind, timed=timed)
    asked = arguments.modes if arguments.modes is not None else "eager" if kind == "cpu" else "eager,graph"
    modes = tuple(checks.unique(asked.split(",")))
    if unknown := [mode for mode in modes if mode not in dit.MODES]:
        raise ConfigurationError(f"--modes takes {', '.join(dit.MODES)} with commas between, got {unknown[0]!r}")
    if kind == "cpu" and "graph" in modes:
        raise ConfigurationError("a CUDA graph needs a GPU; on CPU processes --modes takes eager alone")
    cases = parse(arguments, kind, counts)
    config.check()
    integration.enable()  # raises without a tested diffusers, before ranks start
    integration.disable()
    checks.appendable(arguments.out)
    if kind == "cpu" and launch.is_main():
        print(
            "CPU processes, narrow models: a check that the outputs agree; their times say nothing of GPUs.", flush=True
        )
    for count, fitting in cases.items():
        launch.run(dit.body, count, kind, fitting, modes, timed, arguments.out, timed=timed)
    if launch.is_main():
        dit.show(arguments.out, timed)
    return 0


def parse(arguments: argparse.Namespace, kind: str, counts: list[int]) -> dict[int, list[Case]]:
    """The cases of each number of ranks. Raises ConfigurationError and ShapeError for one that no run can have; of the
    default ones with the default text, those that do not divide over the ranks are left out."""
    from .dit_models import Case

    gpu = kind == "cuda"
    text = arguments.text if arguments.text is not None else 512 if gpu else 32
    rounds = arguments.rounds if arguments.rounds is not None else 5 if gpu else 1
    for name, value in (("--text", text), ("--rounds", rounds)):
        if value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}")
    sizes = [_size(given) for given in arguments.cases or (DEFAULT if gpu else _ON_CPU)]
    cases = [Case(*size, text, rounds, tiny=not gpu) for size in sizes]
    found = {}
    for count in counts:
        problems = {case: problem for case in cases if (problem := _indivisible(case, count))}
        if problems and (arguments.cases or arguments.text or len(problems) == len(cases)):
            raise ShapeError(next(iter(problems.values())))
        found[count] = [case for case in cases if case not in problems]
    return found


def _size(given: str) -> tuple[str, int, int, int]:
    from .dit_models import MODELS

    model, _, size = given.partition(":")
    try:
        width, height, frames = (int(x) for x in [*size.split("x"), "1"][:3])
        if model in MODELS and size.count("x") in (1, 2) and min(width // 16, height // 16, frames) >= 1:
            return model, width, height, frames
    except ValueError:
        pass
    raise ConfigurationError(
        f"a case is MODEL:WIDTHxHEIGHT or with xFRAMES, MODEL of {', '.join(MODELS)}, sides of 16 pixels or more; "
        f"got {given!r}"
    )


def _indivisible(case: Case, count: int) -> str:
    """What of the case does not divide over the ranks; "" where all does."""
    from .dit_models import config

    parts = {"image tokens": case.image_tokens, "text tokens": case.joint_text}
    parts["heads"] = config(case)["num_attention_heads"]
    for what, number in parts.items():
        if number % count:
            return (
                f"{case.name} has {number} {what}, which do not divide over {count} ranks; choose other sizes or ranks"
            )
    return ""
