"""What a command can know to be wrong before it measures. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeVar

from ..errors import ConfigurationError

Value = TypeVar("Value", int, str)
RESULTS = Path("fa_a2a_results")


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """--out, by default fa_a2a_results/NAME.jsonl."""
    path = RESULTS / f"{name}.jsonl"
    parser.add_argument("--out", type=Path, default=path, help=f"JSON lines go here; {path} by default")


def writable(path: Path | None, option: str) -> None:
    """ConfigurationError unless the file can be written; makes its folder. None is no file."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigurationError(f"{option} must be a file, got the folder {path}; add a file name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{option} cannot be written: {path} ({error.strerror}); name another file") from error


def appendable(path: Path, option: str = "--out") -> None:
    """ConfigurationError unless result lines can be added: the file can be written, and holds lines or nothing."""
    from .record import read

    writable(path, option)
    if path.is_file():
        read(path)


def readable(path: Path, what: str) -> None:
    """ConfigurationError unless there is such a file."""
    if path.is_dir():
        raise ConfigurationError(f"a {what} must be a file, got the folder {path}; name a file in it")
    if not path.is_file():
        raise ConfigurationError(f"no such {what}: {path}")


def unique(values: list[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


def counts(text: str) -> list[int]:
    """An option's whole numbers with commas between; argparse.ArgumentTypeError for anything else."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected whole numbers of at least 1 with commas between, got {text!r}")
    return numbers
