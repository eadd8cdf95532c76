"""The options of `fa-a2a sweep`, and what they start. Imports no torch before a measurement runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..errors import ConfigurationError
from . import checks

LAYER_METHODS = ("overlapped", "nccl_packed", "symm_mem", "diffusers")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there is a GPU")
    parser.add_argument(
        "--ranks", type=checks.counts, help="2,4,8 by default as far as there are GPUs, on CPUs 2,4; or torchrun's"
    )
    parser.add_argument(
        "--seq-lens", type=checks.counts, help="of the whole sequence; 4608 to 32768, on CPUs 256 to 1024"
    )
    parser.add_argument("--heads", type=checks.counts, help="24 and 12, with --layer 24; on CPUs 8")
    parser.add_argument("--head-dim", type=int, help="128, on CPUs 64")
    parser.add_argument("--batch", type=int, default=1, help="1 by default")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16, on CPUs float32")
    parser.add_argument("--kernel", default="auto", help="fa4, fa3 or cpu; auto takes what this machine runs best")
    parser.add_argument("--rounds", type=int, help="timed rounds; 12, on CPUs 3")
    parser.add_argument(
        "--profile",
        help="platform profile for the prediction: name or JSON file; the one of this device and ranks by default",
    )
    parser.add_argument(
        "--layer",
        nargs="*",
        choices=LAYER_METHODS,
        metavar="METHOD",
        help="time the whole layer, both exchanges included: fa_a2a, NCCL and attention alone, and the methods named, "
        f"with spaces between; without names all of {' '.join(LAYER_METHODS)}",
    )
    parser.add_argument(
        "--emulate",
        type=int,
        metavar="P",
        help="on two GPUs, each standing for one of P ranks: what it computes, sends and receives then. Without "
        "serial; with --layer the overlapped layer and attention alone",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON lines go here; fa_a2a_results/sweep.jsonl by default, with --layer layer.jsonl, with --emulate "
        "emulated.jsonl or emulated_layer.jsonl",
    )
    parser.add_argument("--plot", type=Path, help="the plot; beside --out by default")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from .. import config, plot
    from ..xstage import load_profile
    from . import checks, forecast, launch, main, record

    if arguments.emulate is not None:
        return _emulate(arguments)
    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda needs a GPU, and torch sees none; leave it out to use CPU processes")
    layer = arguments.layer is not None
    chosen_heads = arguments.heads is not None
    if layer and kind == "cuda":
        arguments.heads = arguments.heads or [24]
    rows = main.rows_by_ranks(main.cases(arguments, kind), main.rank_counts(arguments.ranks, kind), chosen_heads)
    config.check()
    if arguments.profile is not None:
        load_profile(arguments.profile)
    out = arguments.out or Path("fa_a2a_results") / ("layer.jsonl" if layer else "sweep.jsonl")
    checks.appendable(out)
    picture = arguments.plot or out.with_suffix(".png")
    if picture == out:
        raise ConfigurationError(f"the lines and the plot need two files, got {out} for both; name others")
    plot.check(picture, "--plot", arguments.plot is not None)
    if kind == "cpu" and launch.is_main():
        print(main.CPU_NOTE, flush=True)
    if not layer:
        since = len(record.read(out)) if out.is_file() else 0
        for count, cases in rows.items():
            launch.run(main.sweep_body, count, kind, cases, out)
        if launch.is_main():
            main.show(out, picture, since, forecast.preview(rows, arguments.profile) if kind == "cpu" else ())
        return 0
    from . import layer as bench

    for count, cases in rows.items():
        launch.run(bench.body, count, kind, cases, tuple(arguments.layer or LAYER_METHODS), out)
    if launch.is_main():
        bench.show(out, picture)
    return 0


def _emulate(arguments: argparse.Namespace) -> int:
    import torch

    from .. import config
    from ..layout import MAX_RANKS
    from ..ops import overlap_schedule
    from ..xstage import load_profile
    from . import emulate, launch, main

    num_ranks, layer = arguments.emulate, arguments.layer is not None
    for wrong, got in (
        (arguments.device == "cpu", "--device cpu"),
        (bool(arguments.layer), f"--layer {' '.join(arguments.layer or ())}"),
        (arguments.plot is not None, "--plot"),
        (arguments.ranks not in (None, [2]), f"--ranks {','.join(map(str, arguments.ranks or ()))}"),
        (launch.under_torchrun() and os.environ["WORLD_SIZE"] != "2", f"{os.environ.get('WORLD_SIZE')} of torchrun's"),
    ):
        if wrong:
            raise ConfigurationError(
                f"--emulate takes two ranks on two GPUs, and draws nothing; got {got}; leave it out"
            )
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "--emulate measures two GPUs, and torch sees none; fa-a2a audit tells without them what the model expects"
        )
    if not 2 < num_ranks <= MAX_RANKS:
        raise ConfigurationError(f"--emulate takes 3 to {MAX_RANKS} ranks, got {num_ranks}; sweep measures 2")
    dim = overlap_schedule.HEAD_DIM
    if layer and not (
        arguments.kernel in ("auto", "fa4") and arguments.head_dim in (None, dim) and arguments.batch == 1
    ):
        raise ConfigurationError(f"--layer --emulate is for kernel fa4, head_dim {dim} and batch 1; leave them out")
    if layer and num_ranks > overlap_schedule.MAX_RANKS:
        raise ConfigurationError(f"the layer is for at most {overlap_schedule.MAX_RANKS} ranks, got {num_ranks}")
    if layer:
        arguments.heads = arguments.heads or [24]
    (rows,) = main.rows_by_ranks(main.cases(arguments, "cuda"), [num_ranks], arguments.heads is not None).values()
    config.check()
    if arguments.profile is not None:
        load_profile(arguments.profile)
    out = arguments.out or checks.RESULTS / f"{emulate.LAYER_KIND if layer else emulate.KIND}.jsonl"
    checks.appendable(out)
    launch.run(emulate.body, main.rank_counts([2], "cuda")[0], "cuda", rows, num_ranks, layer, out)
    return 0
