"""The command fa-a2a: sweep, dit, calibrate, audit, exchange, pace, kernel, plot, compile, litmus, soak, doctor."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from . import __version__
from .bench import audit_options, checks, dit_options, interrupt, kernel_options, pace_options, sweep_options, tools
from .errors import ConfigurationError, FaA2AError


def main(argv: list[str] | None = None) -> int:
    """Exit code; what is wrong is said in one line. 130 and 143 after Ctrl-C and SIGTERM, as shells have it."""
    with interrupt.raising():
        try:
            arguments = _parser().parse_args(argv)
            code = int(globals()[f"_{arguments.command}"](arguments))
            sys.stdout.flush()
            return code
        except FaA2AError as error:
            return _say(str(error), 1)
        except KeyboardInterrupt:
            return _say("interrupted", 128 + signal.SIGINT)
        except interrupt.Terminated:
            return _say("interrupted", 128 + signal.SIGTERM)
        except BrokenPipeError:  # the reader has left, as head does; nor may Python's last flush complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE


def _say(text: str, code: int) -> int:
    print(f"fa-a2a: {text}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fa-a2a",
        description="Attention with the all-to-all inside: what this machine can do, and what it costs. "
        "`fa-a2a COMMAND --help` says what a command needs and writes. Exit codes: 0, 1 for what is refused or goes "
        "wrong, 2 for options that there are not.",
    )
    parser.add_argument("--version", action="version", version=f"fa_a2a {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, more: str) -> argparse.ArgumentParser:
        end = "" if text.endswith("?") else "."
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}{end} {more}")

    lines = "Adds JSON lines to --out; numbers with commas between are measured one after the other."
    gpus = f"Needs two GPUs of one host; starts a process for each, or runs under torchrun. {lines}"
    either = f"Starts a process for each GPU, or CPU processes without one, or runs under torchrun. {lines}"
    sweep_options.add(
        add("sweep", "time serial and fused attention, or the layer, against sequence length", f"{either} Then plots.")
    )
    dit_options.add(add("dit", "time whole diffusion transformers: one GPU, diffusers, ours", either))
    _add_calibrate(
        add(
            "calibrate", "measure this machine's path between GPUs, or fit samples of it", "Writes a profile for audit."
        )
    )
    audit_options.add(
        add("audit", "does the exchange hide behind attention? The model's answer", "Measures nothing; needs no GPU.")
    )
    _add_exchange(add("exchange", "time the exchange before attention: ours, copies, NCCL", gpus))
    pace_options.add(add("pace", "time the persistent attention kernel: builds, orders, paces, release", gpus))
    kernel_options.add(add("kernel", "time attention alone on one GPU: fa3 beside fa4", "Adds JSON lines to --out."))
    plot = add("plot", "plot the lines of results files", "Needs matplotlib: pip install 'fa_a2a[plot]'.")
    plot.add_argument("results", nargs="+", type=Path, help="JSON-lines files, as the other commands write them")
    plot.add_argument("--out", type=Path, default=Path("sweep.png"), help="the picture; sweep.png by default")
    plot.add_argument("--readme", type=Path, help="also make the marked tables of this file anew")
    build = add("compile", "compile the GPU kernels into the cache; needs no GPU", "Kernels that are there are kept.")
    build.add_argument("--arch", choices=("sm_90a", "sm_100a"), help="sm_90a or sm_100a; this machine's GPU by default")
    build.add_argument(
        "--kernel", choices=("all", "fa4", "fa3"), default="all", help="fa3 needs nvcc; all takes it where nvcc is"
    )
    build.add_argument("--num-sms", type=int, default=None, help="SMs of that GPU; 132 for sm_90a, 148 for sm_100a")
    litmus = add("litmus", "memory ordering of stores to a peer: does the fence cover them?", "Needs two GPUs.")
    litmus.add_argument("--rounds", type=int, default=20000, help="of each test; 20000 by default")
    checks.add_out(litmus, "litmus")
    soak = add(
        "soak", "very many calls with changing shapes, every output checked bitwise", "On GPUs or CPU processes."
    )
    soak.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there are two GPUs")
    soak.add_argument("--ranks", type=int, default=2, help="2 by default")
    soak.add_argument("--calls", type=int, help="20000, on CPUs 100000")
    soak.add_argument(
        "--delays-us", type=float, default=0.0, help="longest random delay before, between and after; none by default"
    )
    soak.add_argument("--traffic", action="store_true", help="all-reduces and peer copies beside the calls; GPUs")
    checks.add_out(soak, "soak")
    add("doctor", "what this machine offers, and which path 'auto' takes", "On several GPUs also checks one layer.")
    return parser


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    results = Path("fa_a2a_results")
    parser.add_argument("--samples", type=Path, nargs="+", help="fit these recorded lines; needs no GPU")
    parser.add_argument("--ranks", type=int, help="GPUs to use; all by default, or torchrun's")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all points; 7 by default")
    parser.add_argument("--quick", action="store_true", help="fewer gaps and volumes")
    parser.add_argument("--name", help="the profile's name; by default from device and ranks, as h200x4")
    parser.add_argument(
        "--base", help="profile to take attention's speed from; a shipped one of this device by default"
    )
    parser.add_argument("--attention-tflops", type=float, help="attention's speed at head_dim 128 instead")
    checks.add_out(parser, "calibrate")
    parser.add_argument("--profile-out", type=Path, help=f"the profile; {results}/NAME.json by default")
    parser.add_argument("--plot", type=Path, help="the plot; beside the profile by default")


def _add_exchange(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=checks.counts, help="2,4,8 by default as far as there are GPUs; or torchrun's")
    parser.add_argument(
        "--seq-lens",
        type=checks.counts,
        default=[4608, 8192, 16384, 32768],
        help="of the whole sequence; 4608 to 32768",
    )
    parser.add_argument("--heads", type=checks.counts, default=[24], help="24 by default")
    parser.add_argument("--head-dim", type=int, default=128, help="128 by default")
    parser.add_argument("--batch", type=int, default=1, help="1 by default")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="bfloat16 by default")
    methods = ["st", "bulk", "copies", "nccl", "nccl_packed"]
    parser.add_argument("--methods", nargs="+", default=methods, help=f"spaces between; {' '.join(methods)} by default")
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds; 12 by default")
    checks.add_out(parser, "exchange")


def _sweep(arguments: argparse.Namespace) -> int:
    return sweep_options.run(arguments)


def _dit(arguments: argparse.Namespace) -> int:
    return dit_options.run(arguments)


def _calibrate(arguments: argparse.Namespace) -> int:
    from .bench import fitting

    for path in arguments.samples or ():
        if not path.is_file():
            raise ConfigurationError(f"no such samples file: {path}; record one with fa-a2a calibrate on GPUs")
    if arguments.samples is None:
        import torch

        from .bench import calibrate, launch

        if not torch.cuda.is_available():
            way_out = "give --samples FILE to fit recorded ones"
            raise ConfigurationError(f"calibrate measures the path between GPUs, and torch sees none; {way_out}")
        ranks = calibrate.rank_count(arguments.ranks)
        if arguments.rounds < 1:
            raise ConfigurationError(f"--rounds must be at least 1, got {arguments.rounds}")
        checks.appendable(arguments.out)
        checks.writable(arguments.profile_out, "--profile-out")
        checks.writable(arguments.plot, "--plot")
        launch.run(calibrate.whole, ranks, "cuda", arguments.rounds, arguments.quick, arguments.out)
        if not launch.is_main():
            return 0
    fitting.report(arguments)
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    return audit_options.run(arguments)


def _exchange(arguments: argparse.Namespace) -> int:
    import torch

    from .bench import exchange, launch, main

    if not torch.cuda.is_available():
        raise ConfigurationError(
            "exchange measures the path between GPUs, and torch sees none; run it where there are two"
        )
    rows = main.rows_by_ranks(exchange.cases(arguments), main.rank_counts(arguments.ranks, "cuda"), chosen_heads=True)
    checks.appendable(arguments.out)
    for count, cases in rows.items():
        launch.run(exchange.body, count, "cuda", cases, arguments.out)
    return 0


def _pace(arguments: argparse.Namespace) -> int:
    return pace_options.run(arguments)


def _kernel(arguments: argparse.Namespace) -> int:
    return kernel_options.run(arguments)


def _litmus(arguments: argparse.Namespace) -> int:
    from .bench import launch, litmus

    checks.appendable(arguments.out)
    launch.run(litmus.body, 2, "cuda", arguments.rounds, arguments.out)
    return 0


def _soak(arguments: argparse.Namespace) -> int:
    import torch

    from .bench import launch, main, soak

    kind = arguments.device or ("cuda" if torch.cuda.device_count() > 1 else "cpu")
    (ranks,) = main.rank_counts([arguments.ranks], kind, timed=False)
    calls = arguments.calls if arguments.calls is not None else {"cuda": 20_000, "cpu": 100_000}[kind]
    if calls < 10:
        raise ConfigurationError(f"--calls must be at least 10, got {calls}")
    if not 0 <= arguments.delays_us < 1e6:
        raise ConfigurationError(f"--delays-us must be from 0 to below a second, got {arguments.delays_us}")
    if arguments.traffic and kind == "cpu":
        raise ConfigurationError("--traffic is about the links between GPUs; leave it out on CPU processes")
    checks.appendable(arguments.out)
    launch.run(soak.body, ranks, kind, calls, arguments.delays_us, arguments.traffic, arguments.out, timed=False)
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    return tools.plot(arguments)


def _compile(arguments: argparse.Namespace) -> int:
    return tools.build(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    import torch

    from .bench import launch
    from .doctor import check_ranks, fused_problem, report

    for line in report():
        print(line, flush=True)
    several = torch.cuda.is_available() and torch.cuda.device_count() > 1 and not launch.under_torchrun()
    if several and fused_problem() is None:
        launch.run(check_ranks, torch.cuda.device_count(), "cuda")
    return 0


if __name__ == "__main__":
    sys.exit(main())
