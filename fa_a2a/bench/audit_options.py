"""`fa-a2a audit`: what the X-Stage model expects of one shape, for each kernel design, in words. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses

from ..errors import ConfigurationError
from ..xstage import (
    DESIGNS,
    AttentionShape,
    KernelDesign,
    PlatformProfile,
    audit_attention,
    design,
    load_profile,
    predict_cost,
    shipped_profile,
)
from ..xstage.attention_run import simulate_attention
from ..xstage.platform import StoreName
from ..xstage.shape import OwnChunk

EVERY = "all"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq-len", type=int, required=True, help="of the whole sequence")
    parser.add_argument("--heads", type=int, required=True, help="of all ranks together")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ranks", type=int, help="the profile's by default")
    parser.add_argument("--profile", help="platform profile: name or JSON file; a shipped one for --ranks by default")
    parser.add_argument(
        "--kernel",
        choices=(*DESIGNS, EVERY),
        help="cost of this kernel design term by term, with a simulation; without it: the bounds, and the stock kernel "
        "with tiles as given",
    )
    parser.add_argument("--tile-rows", type=int, help="queries of one output tile; the kernel's, or 128")
    parser.add_argument("--store", choices=("bulk", "st"), help="how tiles are stored; bulk if the profile has it")
    parser.add_argument(
        "--own-chunk", choices=("first", "last"), help="when the own tiles come; the kernel's, or first"
    )


def run(arguments: argparse.Namespace) -> int:
    profile = _profile(arguments)
    store: StoreName = arguments.store or ("bulk" if "bulk" in profile.stores else next(iter(profile.stores)))
    if arguments.kernel is None:
        _bounds(arguments, profile, store)
        return 0
    names = list(DESIGNS) if arguments.kernel == EVERY else [arguments.kernel]
    for place, name in enumerate(names):
        if place:
            print()
        _kernel(arguments, profile, store, design(name))
    return 0


def _profile(arguments: argparse.Namespace) -> PlatformProfile:
    if arguments.profile is not None or arguments.ranks is None:
        return load_profile(arguments.profile or "h200x4")
    if arguments.ranks < 1:
        raise ConfigurationError(f"--ranks must be at least 1, got {arguments.ranks}")
    found = shipped_profile(arguments.ranks)
    if found is None:
        raise ConfigurationError(f"no shipped profile is for {arguments.ranks} ranks; name one with --profile")
    return found


def _call(arguments: argparse.Namespace, profile: PlatformProfile) -> dict[str, int]:
    return {
        "batch": arguments.batch,
        "seq_len": arguments.seq_len,
        "num_heads": arguments.heads,
        "head_dim": arguments.head_dim,
        "num_ranks": profile.num_ranks if arguments.ranks is None else arguments.ranks,
    }


def _bounds(arguments: argparse.Namespace, profile: PlatformProfile, store: StoreName) -> None:
    rows = 128 if arguments.tile_rows is None else arguments.tile_rows
    shape = AttentionShape(**_call(arguments, profile), tile_rows=rows)
    own_chunk: OwnChunk = arguments.own_chunk or "first"
    audit = audit_attention(shape, profile, store=store, own_chunk=own_chunk)
    print(audit.explain())
    terms = audit.terms
    print(
        f"terms of a launch, us: a waits of full waves {terms.wave_wait_us:.1f} + {terms.drift_us:.1f}; "
        f"b loads behind a blocked store {terms.blocked_load_us:.1f}; c drain after the last tile "
        f"{terms.last_drain_us:.1f}; d for having touched a peer: none"
    )


def _kernel(arguments: argparse.Namespace, profile: PlatformProfile, store: StoreName, kernel: KernelDesign) -> None:
    if arguments.own_chunk not in (None, kernel.own_chunk):
        raise ConfigurationError(
            f"kernel design {kernel.name!r} takes its own chunk {kernel.own_chunk}, got --own-chunk "
            f"{arguments.own_chunk}; leave the option out"
        )
    shape = kernel.shape(**_call(arguments, profile), num_sms=profile.num_sms)
    if arguments.tile_rows is not None:
        shape = dataclasses.replace(shape, tile_rows=arguments.tile_rows)
    print(predict_cost(shape, profile, kernel, store=store).explain())
    run = simulate_attention(shape, profile, kernel, store=store)
    print(
        f"simulated launch, all SMs in step: cost {run.cost_us:.1f} us; a tile's stores wait {run.longest_wait_us:.1f} "
        f"us at most; the path holds up to {run.peak_bytes / 1024**2:.2f} MiB; the last byte arrives {run.tail_us:.1f} "
        "us behind the end"
    )
