"""The options of `fa-a2a pace`, and the configurations they stand for. Imports no torch before a measurement runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from . import checks

ORDERS = ("first", "last", "by_head")  # of the own chunk's tiles; fa4_a2a.persistent.Order


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=checks.counts, help="2,4,8 by default as far as there are GPUs; or torchrun's")
    parser.add_argument(
        "--seq-lens", type=checks.counts, default=[4608, 8192, 16384], help="of the whole sequence; 4608 to 16384"
    )
    parser.add_argument("--heads", type=checks.counts, default=[24], help="24 by default")
    parser.add_argument("--head-dim", type=int, default=128, help="128 by default")
    parser.add_argument("--batch", type=int, default=1, help="1 by default")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="bfloat16 by default")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["warp"],
        help="builds with spaces between, such as warp/tile step/232:40 consumer; warp by default",
    )
    parser.add_argument(
        "--orders", nargs="+", default=["first", "last"], help="own chunk: first last by_head; the first two by default"
    )
    parser.add_argument(
        "--paces", nargs="+", type=int, default=[0, 1500, 3000], help="ns between slices; 0 1500 3000 by default"
    )
    parser.add_argument("--stamps", action="store_true", help="also record how long each tile waits for its staging")
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds; 12 by default")
    checks.add_out(parser, "pace")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from . import checks, launch, main, pace

    if not torch.cuda.is_available():
        raise ConfigurationError("pace measures stores between GPUs, and torch sees none; run it where there are two")
    arguments.kernel, arguments.profile = "fa4", "none"
    cases, chosen = main.cases(arguments, "cuda"), configs(arguments.variants, arguments.orders, arguments.paces)
    rows = main.rows_by_ranks(cases, main.rank_counts(arguments.ranks, "cuda"), chosen_heads=True)
    checks.appendable(arguments.out)
    for count, mine in rows.items():
        launch.run(pace.body, count, "cuda", mine, chosen, arguments.stamps, arguments.out)
    return 0


@dataclass(frozen=True)
class Config:
    """One configuration of the persistent kernel. variant: see `build_of`."""

    variant: str
    order: str
    pace_ns: int

    @property
    def name(self) -> str:
        return f"{self.variant} {self.order} {self.pace_ns}"


def build_of(variant: str) -> Any:
    """fa4_a2a.persistent.Build from words with / between: its store, barriers and pace by their names, rows8 to rows64
    for slice_rows, 232:40 for registers. "warp" is the default build."""
    from fa4_a2a.persistent import BARRIERS, PACES, STORES, Build

    fields: dict[str, Any] = {}
    for word in variant.split("/"):
        numbers = word.removeprefix("rows").split(":")
        if word in STORES + BARRIERS + PACES:
            field = next(
                f for f, names in (("store", STORES), ("barriers", BARRIERS), ("pace", PACES)) if word in names
            )
            fields[field] = word
        elif word.startswith("rows") and numbers[0].isdigit():
            fields["slice_rows"] = int(numbers[0])
        elif len(numbers) == 2 and all(n.isdigit() for n in numbers):
            fields["registers"] = (int(numbers[0]), int(numbers[1]))
        else:
            known = ", ".join(STORES + BARRIERS + PACES)
            raise ConfigurationError(f"a variant is made of {known}, rowsN and A:B with / between, got {variant!r}")
    return Build(**fields)


def configs(variants: list[str], orders: list[str], paces: list[int]) -> list[Config]:
    """Every combination. Raises ConfigurationError for words that there are not."""
    for variant in variants:
        build_of(variant)
    if wrong := [order for order in orders if order not in ORDERS]:
        raise ConfigurationError(f"an order is one of {', '.join(ORDERS)}, got {wrong[0]!r}")
    return [Config(v, order, pace) for v in variants for order in orders for pace in paces]
