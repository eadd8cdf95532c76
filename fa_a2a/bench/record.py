"""JSON lines of results: each carries what is needed to trust it later, or to see that it is stale."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import config

_PACKAGE = Path(__file__).parents[1]
_PACKAGES = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "nvshmem4py-cu13", "triton")


def content_hash() -> str:
    """Hash of everything a figure depends on: kernels, comm, ops. A line with another one is stale."""
    import importlib.util

    folders = [_PACKAGE / "comm", _PACKAGE / "ops"]
    spec = importlib.util.find_spec("fa4_a2a")
    if spec is not None and spec.submodule_search_locations:
        folders.append(Path(spec.submodule_search_locations[0]))
    files = [_PACKAGE / "layout.py", *(f for folder in folders for f in folder.rglob("*.py"))]
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: (f.parent.name, f.name)):
        digest.update(f"{file.parent.name}/{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Fields of every line: device, world size, date, git revision, versions and content hash."""
    return {
        "device": device_name(device),
        "world_size": world_size,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "git": _git_revision(),
        "content_hash": content_hash(),
        "versions": _versions(device),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _versions(device: torch.device) -> dict[str, str]:
    found = {"fa_a2a": _version("fa_a2a")} | {name: _version(name) for name in _PACKAGES}
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda or ""
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {name: text for name, text in found.items() if text}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        if package == "fa_a2a":
            from .. import __version__

            return __version__
        return ""


def _git_revision() -> str:
    """Revision of the checkout the package lies in, "-dirty" with uncommitted changes; outside a checkout what
    FA_A2A_REVISION says."""
    command = ["git", "-C", str(_PACKAGE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return config.read("FA_A2A_REVISION")


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file. Raises ConfigurationError for a line that is not a JSON object."""
    from ..errors import ConfigurationError

    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{path}:{number}: a results file has one JSON object a line; {error}") from error
        if not isinstance(line, dict):
            raise ConfigurationError(f"{path}:{number}: a results file has one JSON object a line, got {text[:40]!r}")
        lines.append(line)
    return lines
