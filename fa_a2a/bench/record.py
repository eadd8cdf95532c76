"""JSON lines of results: each carries what is needed to trust it later, or to see that it is stale."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import config
from ..native.build import source_hash
from .sources import code_of

_PACKAGE = Path(__file__).parents[1]
_PACKAGES = (
    "torch",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass",
    "quack-kernels",
    "nvshmem4py-cu13",
    "triton",
    "diffusers",
)


_SIGNAL = (
    "layout.py",
    "sharding.py",
    "comm/nvshmem*.py",
    "comm/buffers.py",
    "comm/workspace.py",
    "fa4_a2a/signal*.py",
    "fa4_a2a/ptx.py",
    "fa4_a2a/toolchain.py",
)
_ATTENTION = (
    "ops/kernels.py",
    "ops/pieces.py",
    "ops/fused.py",
    "ops/serial.py",
    "ops/fa4.py",
    "ops/cpu.py",
    "xstage/tiles.py",
    "comm/*memory.py",
    "comm/coll*.py",
)
_ONE_GPU = (
    "ops/kernels.py",
    "ops/fa4.py",
    "ops/pace.py",
    "xstage/tiles.py",
    "fa4_a2a/forward*.py",
    "fa4_a2a/persistent*.py",
)
_LAYER = (
    *_SIGNAL,
    *_ATTENTION,
    "nn.py",
    "ops/functional.py",
    "ops/layer.py",
    "ops/overlap*.py",
    "ops/pace.py",
    "ops/scatter.py",
    "xstage/overlap.py",
    "fa4_a2a/forward*.py",
    "fa4_a2a/overlap*.py",
    "fa4_a2a/persistent*.py",
    "fa4_a2a/scatter*.py",
)
_SWEEP = (*_SIGNAL, *_ATTENTION, "ops/pace.py", "fa4_a2a/forward*.py", "fa4_a2a/persistent*.py")
_FILES = {  # what the figures of a kind of line depend on
    "sweep": _SWEEP,
    "emulated": _SWEEP,
    "pace": (*_SIGNAL, *_ATTENTION, "fa4_a2a/forward*.py", "fa4_a2a/persistent*.py"),
    "designs": _ONE_GPU,
    "kernel": _ONE_GPU,
    "litmus": (*_SIGNAL, "fa4_a2a/litmus*.py"),
    "soak": ("layout.py", "xstage/tiles.py", "comm/*.py", "ops/*.py", "fa4_a2a/*.py"),
    "calibrate": (*_SIGNAL, "fa4_a2a/burst*.py"),
    "exchange": (*_SIGNAL, "ops/scatter.py", "fa4_a2a/scatter*.py"),
    "layer": _LAYER,
    "emulated_layer": _LAYER,
    "dit": (*_LAYER, "integrations/diffusers/*.py", "integrations/graph.py"),
    "dit_check": (*_LAYER, "integrations/diffusers/*.py", "integrations/graph.py"),
}


def content_hash(kind: str, kernel: str | None = None) -> str:
    """Hash of the code that a figure of this kind depends on, words left out. A line with another one is stale.

    Of a kind that is not listed: everything in comm, ops and the kernels. Of lines of kernel fa3 also its own sources.
    """
    patterns = _FILES.get(kind, ("layout.py", "sharding.py", "comm/*.py", "ops/*.py", "fa4_a2a/*.py"))
    if kernel == "fa3":
        patterns += ("ops/fa3.py", "native/*.py")
    spec = importlib.util.find_spec("fa4_a2a")
    kernels = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    digest = hashlib.sha256()
    for pattern in patterns:
        ours = not pattern.startswith("fa4_a2a/")
        root = _PACKAGE if ours else kernels
        for file in sorted(root.glob(pattern.removeprefix("fa4_a2a/"))) if root else ():
            digest.update(f"{'' if ours else 'fa4_a2a/'}{file.name}\n".encode() + code_of(file))
    if kernel == "fa3":
        digest.update(source_hash().encode())
    return digest.hexdigest()[:16]


def environment(kind: str, device: torch.device, world_size: int, kernel: str | None = None) -> dict[str, Any]:
    """Fields of every line: kind, device, world size, date, git revision, versions and content hash; and how many GPUs
    the ranks shared, where they did."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else world_size
    return {
        "kind": kind,
        "device": device_name(device),
        "world_size": world_size,
        **({"shared_gpus": gpus} if gpus < world_size else {}),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "git": _git_revision(),
        "content_hash": content_hash(kind, kernel),
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
    """What FA_A2A_REVISION says; by default the revision of the checkout that the package lies in, "-dirty" with
    uncommitted changes."""
    if said := config.read("FA_A2A_REVISION"):
        return said
    command = ["git", "-C", str(_PACKAGE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file. Raises ConfigurationError for a line that is not a JSON object."""
    from ..errors import ConfigurationError

    try:
        whole = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigurationError(f"{path}: a results file has one JSON object a line; {reason}") from error
    lines = []
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{path}:{number}: a results file has one JSON object a line; {error}") from error
        if not isinstance(line, dict):
            raise ConfigurationError(f"{path}:{number}: a results file has one JSON object a line, got {text[:40]!r}")
        lines.append(line)
    return lines
