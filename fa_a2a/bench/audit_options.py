"""`fa-a2a audit`: is the exchange of one shape hidden, and why? The X-Stage model's answer, in words."""

from __future__ import annotations

import argparse
import dataclasses

from ..errors import ConfigurationError
from ..xstage import DESIGNS, AttentionShape, KernelDesign, PlatformProfile, audit_attention, design, predict_cost
from ..xstage.attention_run import simulate_attention
from ..xstage.platform import StoreName
from ..xstage.shape import OwnChunk
from . import audit as words

EVERY = "all"
LIBRARY = "persistent"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq-len", type=int, required=True, help="of the whole sequence")
    parser.add_argument("--heads", type=int, required=True, help="of all ranks together")
    parser.add_argument("--head-dim", type=int, default=128, help="128 by default")
    parser.add_argument("--batch", type=int, default=1, help="1 by default")
    parser.add_argument("--ranks", type=int, help="the profile's by default, or 4")
    parser.add_argument("--gpu", help='as torch names it, such as "NVIDIA H200"; any that a profile is shipped for')
    parser.add_argument("--profile", help="platform profile: name or JSON file; a shipped one for --ranks by default")
    parser.add_argument(
        "--kernel",
        choices=(*DESIGNS, EVERY),
        help="cost of this kernel design term by term, with a simulation; without it: the library's, and the two "
        "bounds with the stock kernel on tiles as given",
    )
    parser.add_argument("--tile-rows", type=int, help="queries of one output tile; the kernel's, or 128")
    parser.add_argument("--store", choices=("bulk", "st"), help="how tiles are stored; bulk if the profile has it")
    parser.add_argument(
        "--own-chunk", choices=("first", "last"), help="when the own tiles come; the kernel's, or first"
    )


def run(arguments: argparse.Namespace) -> int:
    profile, note, assumed = words.profile_and_note(arguments.profile, arguments.ranks, arguments.gpu)
    store: StoreName = arguments.store or ("bulk" if "bulk" in profile.stores else next(iter(profile.stores)))
    heads, notes = words.even_heads(arguments.heads, arguments.seq_len, profile.num_ranks)
    call = {"batch": arguments.batch, "seq_len": arguments.seq_len, "num_heads": heads, "head_dim": arguments.head_dim}
    call["num_ranks"] = profile.num_ranks
    words.check_tiles(arguments.seq_len, heads, arguments.tile_rows)
    for text in (note, *notes):
        print(f"{text}.")
    if arguments.kernel is not None:
        for name in DESIGNS if arguments.kernel == EVERY else [arguments.kernel]:
            print()
            _kernel(arguments, call, profile, store, design(name), assumed)
        return 0
    paced = arguments.head_dim in design(LIBRARY).tiles
    if arguments.own_chunk is None and arguments.tile_rows is None and paced:
        print()
        _kernel(arguments, call, profile, store, design(LIBRARY), assumed)
    print(
        "\nFor comparison, the bounds of stores that leave at once, and the stock kernel, whose blocks wait for theirs:"
        if paced
        else f"\nNo kernel here paces its stores at head_dim {arguments.head_dim}: the stock kernel's cost is it."
    )
    _bounds(arguments, call, profile, store)
    return 0


def _bounds(arguments: argparse.Namespace, call: dict[str, int], profile: PlatformProfile, store: StoreName) -> None:
    rows = 128 if arguments.tile_rows is None else arguments.tile_rows
    shape = AttentionShape(**call, tile_rows=rows)
    own_chunk: OwnChunk = arguments.own_chunk or "first"
    stock = design("stock")
    speed = stock.tile_speed(shape)
    audit = audit_attention(shape, profile, store=store, own_chunk=own_chunk, kernel=stock.kernel, tile_speed=speed)
    print(audit.explain())
    terms = audit.terms
    print(
        f"terms of a launch, us: a waits of full waves {terms.wave_wait_us:.1f} + {terms.drift_us:.1f}; "
        f"b loads behind a blocked store {terms.blocked_load_us:.1f}; c drain after the last tile "
        f"{terms.last_drain_us:.1f}; d for having touched a peer: none"
    )


def _kernel(
    arguments: argparse.Namespace,
    call: dict[str, int],
    profile: PlatformProfile,
    store: StoreName,
    kernel: KernelDesign,
    assumed: bool,
) -> None:
    if arguments.own_chunk not in (None, kernel.own_chunk):
        raise ConfigurationError(
            f"kernel design {kernel.name!r} takes its own chunk {kernel.own_chunk}, got --own-chunk "
            f"{arguments.own_chunk}; leave the option out"
        )
    shape = kernel.shape(**call, num_sms=profile.num_sms)
    if arguments.tile_rows is not None:
        shape = dataclasses.replace(shape, tile_rows=arguments.tile_rows)
    cost = predict_cost(shape, profile, kernel, store=store)
    print(f"{kernel.name}: {words.verdict(cost)}.")
    if assumed:
        print(f"{words.slower_path(cost)}.")
    if kernel.name == LIBRARY and (text := words.before(shape, profile, call["num_heads"] == arguments.heads)):
        print(f"{text}.")
    print(cost.explain())
    run = simulate_attention(shape, profile, kernel, store=store)
    print(
        f"simulated launch, all SMs in step: cost {run.cost_us:.1f} us; a tile's stores wait {run.longest_wait_us:.1f} "
        f"us at most; the path holds up to {run.peak_bytes / 1024**2:.2f} MiB; the last byte arrives {run.tail_us:.1f} "
        "us behind the end"
    )
