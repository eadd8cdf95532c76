"""The attention kernels by name, and where each one can run. Adapters are imported only when used."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch

from ..comm.pointer import tensor_at
from ..errors import ConfigurationError
from ..layout import Run, equal_stride_runs
from ..xstage.tiles import FA3_TILES

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sink:
    """Where a fused kernel's output goes, chunk by chunk. Views may lie in other ranks' memory.

    o[c]: (B, rows, h, D), chunk c's rows and this rank's heads inside the owner's output; lse[c]: (B, h, rows).
    """

    o: tuple[torch.Tensor, ...]
    lse: tuple[torch.Tensor, ...]

    @cached_property
    def by_run(self) -> tuple[tuple[Run, torch.Tensor, torch.Tensor], ...]:
        """Chunks that lie at equal strides, as one tensor each: (run, O (B, chunks, rows, h, D), LSE (B, chunks, h,
        rows)). What a kernel that takes strides stores to in one launch."""
        runs = equal_stride_runs([t.data_ptr() for t in self.o])
        return tuple((run, _across(self.o, run), _across(self.lse, run)) for run in runs)


def _across(views: tuple[torch.Tensor, ...], run: Run) -> torch.Tensor:
    """The views of a run, which share one layout, as one tensor with the distance between two of them as stride."""
    first = views[run.start]
    step = views[run.start + 1].data_ptr() - first.data_ptr() if run.length > 1 else 0
    shape = (first.shape[0], run.length, *first.shape[1:])
    strides = (first.stride(0), step // first.itemsize, *first.stride()[1:])
    return tensor_at(first.data_ptr(), shape, strides, first.dtype, first.device)


class AttentionKernel(Protocol):
    """One attention kernel on one device. q: (B, S, h, D), k and v: (B, keys, h, D), heads possibly at stride 0.

    What a call has beside full attention over equal heads is cut into such pieces before (pieces.py), but for two
    things: a kernel with an attribute `heads_per_kv` above 1 takes k and v of fewer heads, by that factor; one named in
    CAUSAL also takes `causal_from`, the last key that query row 0 sees, row i seeing i more.
    """

    name: str
    can_fuse: bool  # stores tiles into other ranks' memory itself
    can_release: bool  # ends a call itself: `launches` takes a Release

    def local(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, chunks: int, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention on this rank alone: O (B, S, h, D) and, if asked for, LSE (B, h, S) float32.

        chunks: into how many equal parts a later exchange divides the rows, 1 where they are unequal; a kernel whose
        rounding depends on where its tiles begin starts one at each part, so that the serial and the fused path agree
        bitwise."""
        ...

    def fused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sink: Sink, with_lse: bool
    ) -> None:
        """Attention whose tiles are stored to `sink` as they finish; q's rows are in chunk order."""
        ...


def loadable(t: torch.Tensor) -> torch.Tensor:
    """What GPU kernels load: contiguous head_dim, all other steps and the address multiples of 16 bytes. Anything else
    is copied once."""
    *steps, last = t.stride()
    offsets = t.data_ptr()
    for step in steps:
        offsets |= step * t.itemsize
    return t if last == 1 and offsets % 16 == 0 else t.contiguous()


_ADAPTERS = {"cpu": "cpu", "torch": "sdpa", "fa4": "fa4", "fa3": "fa3"}
KERNELS = tuple(_ADAPTERS)
CAUSAL = ("cpu", "torch", "fa4")
BUILT = ("fa4",)  # for a number of query heads to each K/V head, and for causal attention; the others take any


def problem(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, with_lse: bool, causal: bool = False
) -> str | None:
    """Why the kernel cannot run this on `device`, or None. Cheap; imports no kernel."""
    if causal and name not in CAUSAL:
        return f"kernel '{name}' is built for full attention, and the call is causal"
    if name == "torch":
        return "kernel 'torch' returns no log-sum-exp" if with_lse else None
    if name == "cpu":
        return None if device.type == "cpu" else f"kernel 'cpu' runs on CPU tensors, got {device.type}"
    if name == "fa4":
        return _gpu_problem(name, device, dtype, ((9, 0), (10, 0))) or _fa4_problem(device, head_dim, causal)
    if name == "fa3":
        return _gpu_problem(name, device, dtype, ((9, 0),)) or _fa3_problem(dtype, head_dim)
    raise ConfigurationError(f"kernel must be 'auto' or one of {', '.join(KERNELS)}, got {name!r}")


def _gpu_problem(
    name: str, device: torch.device, dtype: torch.dtype, capabilities: tuple[tuple[int, int], ...]
) -> str | None:
    if device.type != "cuda":
        return f"kernel '{name}' runs on NVIDIA GPUs, got {device.type} tensors"
    if (capability := torch.cuda.get_device_capability(device)) not in capabilities:
        built = " and ".join(f"{major}.{minor}" for major, minor in capabilities)
        return f"kernel '{name}' is built for compute capability {built}, this GPU has {capability[0]}.{capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"kernel '{name}' takes bfloat16 and float16, got {dtype}"
    return None


def _fa4_problem(device: torch.device, head_dim: int, causal: bool) -> str | None:
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    known = (64, 96, 128, 256) if hopper else (64, 128)
    if head_dim not in known:
        return f"kernel 'fa4' takes head dimensions {', '.join(map(str, known))} here, got {head_dim}"
    if causal and not hopper:
        return "kernel 'fa4' is built for causal attention on compute capability 9.0 alone, and the call is causal"
    return _missing_package()


def _fa3_problem(dtype: torch.dtype, head_dim: int) -> str | None:
    if head_dim not in FA3_TILES:
        return f"kernel 'fa3' takes head dimensions {' and '.join(map(str, sorted(FA3_TILES)))}, got {head_dim}"
    from ..native import build

    troubles = map(build.problem, build.variants(head_dim, str(dtype).removeprefix("torch.")))
    return next((trouble for trouble in troubles if trouble), None)


def uncompiled(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a first call of a kernel that can run would have to wait for its compiler by the minute, or None. 'auto' then
    takes another; a call that names the kernel compiles it, for good."""
    if name != "fa3" or device.type != "cuda" or head_dim not in FA3_TILES:
        return None
    from ..native import build

    found = build.variants(head_dim, str(dtype).removeprefix("torch."))
    if all(build.cached(variant).is_file() for variant in found):
        return None
    return "it is not compiled; fa-a2a compile --kernel fa3 does that"


@lru_cache(maxsize=1)
def _missing_package() -> str | None:
    for module in ("cutlass", "flash_attn", "tvm_ffi"):
        if importlib.util.find_spec(module) is None:
            return f"kernel 'fa4' needs the package that provides '{module}'; pip install 'fa_a2a[cu13]'"
    return None


# Compute capabilities on which a GPU kernel has passed its tests as it stands.
_RUN_ON: dict[str, tuple[tuple[int, int], ...]] = {"fa4": ((9, 0),), "fa3": ((9, 0),)}


def verified(name: str, device: torch.device) -> bool:
    """Whether the kernel was run, not only compiled, on this kind of device. 'auto' takes no other."""
    if name not in _RUN_ON:
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in _RUN_ON[name]


@lru_cache(maxsize=32)
def load(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    with_lse: bool,
    fused: bool,
    heads_per_kv: int = 1,
    causal: bool = False,
) -> AttentionKernel:
    """The kernel's adapter; compiles what it will use, or takes it from the cache, before it returns.

    heads_per_kv, causal: what a kernel in BUILT is built for besides."""
    module = importlib.import_module(f"{__package__}.{_ADAPTERS[name]}")
    options = {"heads_per_kv": heads_per_kv, "causal": causal} if name in BUILT else {}
    adapter: AttentionKernel = module.make(device, dtype, head_dim, with_lse, fused, **options)
    return adapter
