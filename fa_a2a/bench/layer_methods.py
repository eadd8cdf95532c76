"""The ways through a whole layer that `fa-a2a sweep --layer` times; what they are stands in layer.py."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UnsupportedError
from ..nn import UlyssesAttention
from ..ops import overlap, serial
from .alone import candidates
from .graphs import first_line
from .layer_case import Layer, Way

_DIFFUSERS_KERNELS = {"cuda": ("flash", "_native_cudnn", "_native_flash", "native"), "cpu": ("native",)}


def ways(layer: Layer, names: tuple[str, ...]) -> tuple[dict[str, Way], dict[str, str]]:
    """fa_a2a, nccl, and those of `names` that every rank can take; and why the others are left out."""
    found, skipped = {"fa_a2a": _ours(layer, "fused"), "nccl": _separate(layer)}, {}
    makers = {"overlapped": _overlapped, "nccl_packed": _packed, "symm_mem": _symmetric_memory, "diffusers": _diffusers}
    for name in (name for name in makers if name in names):
        try:
            found[name], reason = makers[name](layer), ""
        except UnsupportedError as error:
            reason = str(error)
        if reason := layer.agree(f"method {name}", reason):
            found.pop(name, None)
            skipped[name] = reason
    return found, skipped


def alone(layer: Layer) -> dict[str, Way]:
    """The kernel alone on this rank's heads, with each tile that could be the best one."""
    q, k, v = serial.scatter(layer.q, layer.k, layer.v, layer.group)
    scale, adapters = layer.plan.request.scale, candidates("attention", layer.plan.adapter, q.shape)
    return {
        name: Way(lambda adapter=adapter: adapter.local(q, k, v, scale, 1, False)[0], layer.case.kernel, "")  # type: ignore[misc]
        for name, adapter in adapters.items()
    }


def _ours(layer: Layer, exchange: str) -> Way:
    attention, q, k, v = UlyssesAttention(kernel=layer.case.kernel, exchange=exchange), layer.q, layer.k, layer.v

    def call() -> torch.Tensor:
        out = attention(q, k, v)
        assert isinstance(out, torch.Tensor)
        return out

    call()
    workspace = layer.group.workspace
    assert workspace is not None
    return Way(call, layer.case.kernel, workspace.memory.name, workspace.allocated_bytes)


def _overlapped(layer: Layer) -> Way:
    """One kernel for the layer. Compared with the separate exchanges and the kernel on keys in the order it takes."""
    way, workspace = _ours(layer, "overlapped"), layer.group.workspace
    assert workspace is not None
    return replace(way, want=overlap.serial_form(layer.q, layer.k, layer.v, layer.plan, workspace)[0])


def _separate(layer: Layer) -> Way:
    plan, group, q, k, v = layer.plan, layer.group, layer.q, layer.k, layer.v
    return Way(
        lambda: serial.attend(*serial.scatter(q, k, v, group), plan, group)[0], layer.case.kernel, layer.transport
    )


def _wide(x: torch.Tensor) -> torch.Tensor:
    """The same memory as elements of 16 bytes, which torch copies fastest."""
    return x.view(torch.complex128)


def _packed(layer: Layer) -> Way:
    """Buffers are made once; with batch 1 the output leaves the kernel as it is sent."""
    q, k, v, handle = layer.q, layer.k, layer.v, layer.group.handle
    (batch, rows, heads, dim), size = q.shape, layer.group.size
    width = heads // size * dim
    send = q.new_empty(size, 3 * batch, rows, width)
    received, outputs = torch.empty_like(send), q.new_empty(size, batch, rows, width)
    whole = q.new_empty(3 * batch, size, rows, width)
    mine = whole.view(3, batch, size * rows, heads // size, dim)
    wide_send, wide_received, wide_whole = _wide(send), _wide(received).transpose(0, 1), _wide(whole)
    wide_outputs = _wide(outputs).permute(1, 2, 0, 3)

    def call() -> torch.Tensor:
        parts = [_wide(x.view(batch, rows, size, width)).permute(2, 0, 1, 3) for x in (q, k, v)]
        torch.cat(parts, dim=1, out=wide_send)
        dist.all_to_all_single(received, send, group=handle)
        wide_whole.copy_(wide_received)
        o = layer.attend(mine[0], mine[1], mine[2])
        dist.all_to_all_single(outputs, o.view(batch, size, rows, width).transpose(0, 1).contiguous(), group=handle)
        return wide_outputs.contiguous().view(q.dtype).view(q.shape)

    held = sum(x.nbytes for x in (send, received, outputs, whole))
    return Way(call, layer.case.kernel, layer.transport, held)


def _symmetric_memory(layer: Layer) -> Way:
    """Copies by SMs into the peers' Q, K, V and O. Multicast memory is neither needed nor made."""
    if layer.device.type != "cuda":
        raise UnsupportedError("torch's symmetric memory is for GPUs")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read by torch when it maps the peers
    import torch.distributed._symmetric_memory as symm_mem

    q, k, v, rank, size = layer.q, layer.k, layer.v, layer.group.rank, layer.group.size
    batch, rows, heads, dim = q.shape
    h, whole = heads // size, (batch, rows * size, heads // size, dim)
    try:
        block = symm_mem.empty((4, q.numel()), dtype=q.dtype, device=layer.device)
        handle = symm_mem.rendezvous(block, layer.group.handle)
    except RuntimeError as error:
        raise UnsupportedError(f"torch's symmetric memory does not work here: {first_line(error)}") from error
    peers = [handle.get_buffer(r, tuple(block.shape), q.dtype) for r in range(size)]
    others = [(rank + i) % size for i in range(1, size + 1)]  # the own part last
    mine, out = [block[t].view(whole) for t in range(3)], block[3].view(q.shape)
    my_rows, my_heads = slice(rank * rows, (rank + 1) * rows), slice(rank * h, (rank + 1) * h)
    theirs = [(r, t, _wide(peers[r][t].view(whole)[:, my_rows])) for r in others for t in range(3)]
    outputs = [(r, _wide(peers[r][3].view(q.shape)[:, :, my_heads])) for r in others]

    def call() -> torch.Tensor:
        parts = [_wide(x) for x in (q, k, v)]
        for r, t, to in theirs:
            to.copy_(parts[t][:, :, r * h : (r + 1) * h])
        handle.barrier(channel=0)
        o = _wide(layer.attend(mine[0], mine[1], mine[2]))
        for r, to in outputs:
            to.copy_(o[:, r * rows : (r + 1) * rows])
        handle.barrier(channel=1)
        return out

    return Way(call, layer.case.kernel, "torch symmetric memory", block.nbytes)


@lru_cache(maxsize=1)
def _parallel_config(size: int, device: str) -> Any:
    """What a diffusers model's enable_parallelism makes of ContextParallelConfig(ulysses_degree=size)."""
    from diffusers import ContextParallelConfig, ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    context = ContextParallelConfig(ulysses_degree=size)
    mesh = init_device_mesh(device, context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), size, torch.device(device), mesh=mesh)
    return config


def _diffusers(layer: Layer) -> Way:
    """diffusers' dispatch function, which owns both exchanges; the fastest of its kernels that gives right results. The
    kernels are compared without exchanges: with them a slow host could hide which one is faster on the device."""
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
    except ImportError as error:
        raise UnsupportedError(f"diffusers is not installed ({error}); pip install 'fa_a2a[diffusers]'") from error
    config = _parallel_config(layer.group.size, layer.device.type)
    whole = serial.scatter(layer.q, layer.k, layer.v, layer.group)

    def way(name: str) -> Way:
        backend, q, k, v = AttentionBackendName(name), layer.q, layer.k, layer.v
        return Way(
            lambda: dispatch_attention_fn(q, k, v, backend=backend, parallel_config=config),
            name,
            layer.transport,
            exact=False,
        )

    speeds, reasons = {}, []
    for name in _DIFFUSERS_KERNELS[layer.device.type]:
        try:
            with attention_backend(name):  # raises where a package is missing
                reason = "" if layer.close_to_reference(way(name).call()) else "wrong results"
        except Exception as error:  # whatever its kernels raise
            reason = first_line(error)
        if reason := layer.agree(f"diffusers {name}", reason):
            reasons.append(f"{name}: {reason}")
        else:
            alone = partial(dispatch_attention_fn, *whole, backend=AttentionBackendName(name))
            speeds[name] = layer.slowest_us(alone, calls=10)
    if not speeds:
        raise UnsupportedError(f"none of diffusers' kernels works here ({'; '.join(reasons)})")
    return way(min(speeds, key=speeds.__getitem__))
