"""The options of `fa-a2a kernel`. Imports no torch before a measurement runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, ShapeError
from . import checks

if TYPE_CHECKING:
    from . import kernel_designs

SHAPES = "4608x6,8192x6,8192x12,16384x6"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=shapes, default=shapes(SHAPES), help=f"SEQxHEADS of one GPU; {SHAPES}")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128, help="128 by default")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="bfloat16 by default")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[],
        help="other builds of fa3 beside the default one, as 128x176/direct: query rows x keys / output",
    )
    parser.add_argument(
        "--forms",
        nargs="+",
        help="instead of fa3: forms of fa4's kernel with every store local, of stock, chunks, persistent, own_first, "
        "unpaced, no_store_warp; or all",
    )
    parser.add_argument(
        "--ranks", type=checks.counts, default=[2], help="with --forms: of how many, 2 by default; heads are of one"
    )
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds; 12 by default")
    checks.add_out(parser, "kernel")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from ..native.build import OUTPUTS
    from . import kernel, kernel_designs, launch

    if not torch.cuda.is_available():
        raise ConfigurationError("kernel measures attention on a GPU, and torch sees none; run it where there is one")
    if arguments.rounds < 1:
        raise ConfigurationError(f"--rounds must be at least 1, got {arguments.rounds}")
    variants = [variant(text, OUTPUTS) for text in arguments.variants]
    checks.appendable(arguments.out)
    rest = (arguments.head_dim, arguments.dtype, arguments.rounds)
    if arguments.forms is not None:
        chosen = forms(arguments.forms, kernel_designs.FORMS)
        rows = [
            kernel_designs.Case(seq_len, heads, ranks, *rest)
            for seq_len, heads in arguments.shapes
            for ranks in checks.unique(arguments.ranks)
        ]
        equal_chunks(rows)
        launch.run(kernel_designs.body, 1, "cuda", rows, chosen, arguments.out)
        return 0
    cases = [kernel.Case(seq_len, heads, *rest) for seq_len, heads in arguments.shapes]
    launch.run(kernel.body, 1, "cuda", cases, variants, arguments.out)
    return 0


def shapes(text: str) -> list[tuple[int, int]]:
    """SEQxHEADS with commas between; argparse.ArgumentTypeError for anything else."""
    try:
        found = [(int(seq), int(heads)) for seq, heads in (part.split("x") for part in text.split(","))]
    except ValueError:
        found = []
    if not found or min(min(pair) for pair in found) < 1:
        raise argparse.ArgumentTypeError(f"expected SEQxHEADS with commas between, as 8192x6,8192x12; got {text!r}")
    return found


def forms(names: list[str], known: tuple[str, ...]) -> list[str]:
    """Each once, the stock kernel among them. Raises ConfigurationError for one that there is not."""
    if wrong := [name for name in names if name not in (*known, "all")]:
        raise ConfigurationError(f"a form is one of {', '.join(known)}, or all; got {wrong[0]!r}")
    return list(known) if "all" in names else list(dict.fromkeys([known[0], *names]))


def equal_chunks(rows: list[kernel_designs.Case]) -> None:
    """ShapeError for a row whose tokens do not divide over its ranks: the forms are compared on equal chunks."""
    for row in rows:
        if row.seq_len % row.num_ranks:
            got = f"{row.seq_len} tokens over {row.num_ranks} ranks"
            raise ShapeError(f"forms are compared on equal chunks, got {got}; choose a length that divides")


def variant(text: str, outputs: tuple[str, ...]) -> tuple[tuple[int, int], str]:
    """((query rows, keys), output) of ROWSxKEYS/OUTPUT. Raises ConfigurationError for anything else."""
    tile, _, output = text.partition("/")
    numbers = tile.split("x")
    good = len(numbers) == 2 and all(n.isdigit() for n in numbers) and output in outputs
    if not good or int(numbers[0]) not in (128, 192) or int(numbers[1]) % 16 or not 16 <= int(numbers[1]) <= 256:
        rule = f"ROWSxKEYS/OUTPUT, rows 128 or 192, keys a multiple of 16 up to 256, output {' or '.join(outputs)}"
        raise ConfigurationError(f"a variant is {rule}; got {text!r}")
    return (int(numbers[0]), int(numbers[1])), output
