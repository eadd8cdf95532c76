"""What this machine offers, and which path kernel="auto" and exchange="auto" will take, with the reason."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator

import torch

from . import config
from .bench.record import _versions
from .lifecycle import memory_bytes
from .ops import kernels


def report() -> Iterator[str]:
    """Lines of the report. Starts no process group; what needs several ranks is said as such."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    yield f"python {platform.python_version()} on {platform.platform()}"
    yield "versions: " + ", ".join(f"{name} {text}" for name, text in _versions(device).items())
    yield from _gpus()
    yield from _links()
    yield from _kernels(device)
    yield from _path(device)
    yield "symmetric memory: " + _memory()
    yield "cache: " + _cache()
    yield "environment:"
    for variable in config.VARIABLES:
        trouble = config.problem(variable.name)
        yield f"  {variable.name}={config.read(variable.name)}  ({variable.meaning})" + (
            f"  WRONG: {trouble}" if trouble else ""
        )
    for name in config.unknown():
        yield f"  {name}: WRONG: no such variable; it has no effect"


def _gpus() -> Iterator[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield "GPUs: none; attention runs on CPU processes"
        return
    for index in range(count):
        p = torch.cuda.get_device_properties(index)
        peers = [j for j in range(count) if j != index and torch.cuda.can_device_access_peer(index, j)]
        yield (
            f"GPU {index}: {p.name}, compute capability {p.major}.{p.minor}, {p.multi_processor_count} SMs, "
            f"{p.total_memory / 2**30:.0f} GiB; accesses the memory of GPUs {peers or 'none'}"
        )


def _links() -> Iterator[str]:
    """The driver's table of links; NV18 is 18 bonded NVLinks."""
    try:
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return
    for line in shown.splitlines():
        if line.startswith("GPU"):
            name, *links = line.split("\t")
            kinds = [x for x in map(str.strip, links) if x.startswith(("NV", "X", "SYS", "NODE", "PHB", "PXB", "PIX"))]
            yield f"links of {name}: {' '.join(kinds)}"


def _kernels(device: torch.device) -> Iterator[str]:
    dtype = torch.bfloat16
    for name in kernels.KERNELS:
        trouble = kernels.problem(name, device, dtype, 128, False)
        ran = "" if kernels.verified(name, device) else "; compiled for this GPU, not yet run on one"
        yield f"kernel {name}: {'usable' + ran if trouble is None else 'not usable: ' + trouble}"


def fused_problem() -> str | None:
    """Why 'auto' would not take the fused path between this machine's GPUs, as far as one process can tell."""
    device = torch.device("cuda", 0)
    from .comm.nvshmem_world import find

    trouble = kernels.problem("fa4", device, torch.bfloat16, 128, False) or find(device)["problem"]
    if trouble is None and not kernels.verified("fa4", device):
        trouble = "kernel 'fa4' has not been run on this kind of GPU"
    count = torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    blind = next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)
    if trouble is None and blind is not None:
        trouble = f"GPU {blind[0]} cannot access the memory of GPU {blind[1]}"
    return trouble


def _path(device: torch.device) -> Iterator[str]:
    if device.type == "cpu":
        yield 'auto: kernel "cpu", exchange "fused" through shared memory, where all ranks are processes of this host'
    elif (trouble := fused_problem()) is not None:
        yield f'auto: kernel "torch", exchange "collective": {trouble}'
    else:
        yield (
            'auto: kernel "fa4", exchange "overlapped" or "fused" through NVSHMEM as the shape has it, in bfloat16 and '
            "float16; last_plan says why"
        )


def check_ranks(device: torch.device) -> None:
    """One small layer on every GPU, fused against serial: what the report cannot know without several ranks."""
    import torch.distributed as dist

    from .comm.group import resolve
    from .nn import UlyssesAttention

    size, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = (torch.randn(1, 256, 2 * size, 128, device=device).bfloat16() for _ in range(3))
    with torch.no_grad():
        fused = UlyssesAttention(kernel="fa4", exchange="fused")(q, k, v)
        same = torch.equal(fused, UlyssesAttention(kernel="fa4", exchange="collective")(q, k, v))
    verdicts: list[bool] = [False] * size
    dist.all_gather_object(verdicts, same)
    workspace = resolve(None).workspace
    assert workspace is not None
    if rank == 0:
        from .ops.fused import peer_sink

        base = workspace.signals.addresses[0]
        distances = ", ".join(f"{(address - base) / 2**30:g}" for address in workspace.signals.addresses)
        sink = peer_sink(workspace, next(iter(resolve(None).plans.values())).shape, torch.bfloat16)
        print(f"NVSHMEM on {size} GPUs: rank 0 finds its peers' memory at {distances} GiB from its own")
        print(f"  the attention kernel takes {len(sink.by_run)} launch for all owners; a test layer held {_memory()}")
        print(f"  fused equals serial bit by bit: {'yes' if all(verdicts) else 'NO, on ranks ' + str(verdicts)}")


def _memory() -> str:
    held = memory_bytes()
    per_group = ", ".join(f"group {name}: {size / 2**20:.1f} MiB" for name, size in held.items())
    return (per_group or "no workspace in this process") + "; torch's memory statistics do not see it on GPUs"


def _cache() -> str:
    try:
        from fa4_a2a.cache import cache_dir, cached_kernels

        found = cached_kernels()
    except ImportError:
        return "no CuTe DSL installed"
    current = [k for k in found if k.current]
    return f"{cache_dir()}: {len(current)} kernels of this version, {len(found) - len(current)} of others"
