"""One call's configuration as a rank passes it, and the checks that need no other rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..comm.group import Group
from ..errors import ConfigurationError, ShapeError, UnsupportedError
from ..layout import ExchangeShape
from . import kernels

EXCHANGES = ("overlapped", "fused", "collective")


@dataclass(frozen=True)
class Request:
    """One call's configuration, the same on every rank. Shapes are those of the whole exchange."""

    batch: int
    seq_len: int
    num_heads: int
    head_dim: int
    dtype: str
    device: str
    kernel: str
    exchange: str
    scale: float
    with_lse: bool
    head_sharded: bool  # inputs did not come through scatter_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def shape(self, num_ranks: int) -> ExchangeShape:
        return ExchangeShape(
            self.batch, self.seq_len, self.num_heads, self.head_dim, num_ranks, self.torch_dtype.itemsize
        )


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ShapeError or UnsupportedError for inputs that no path takes. Peers are compared later."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor) or t.dim() != 4:
            got = f"{t.dim()} dimensions" if isinstance(t, torch.Tensor) else type(t).__name__
            raise ShapeError(f"{name} must be a tensor (batch, seq, heads, head_dim), got {got}")
        if t.dtype != q.dtype or t.device != q.device:
            raise ShapeError(
                f"q, k and v must have one dtype and device; q has {q.dtype} on {q.device}, "
                f"{name} {t.dtype} on {t.device}"
            )
        if t.shape != q.shape:
            raise ShapeError(
                f"q, k and v must have one shape (self-attention, as many key heads as query heads); q has "
                f"{tuple(q.shape)}, {name} {tuple(t.shape)}"
            )
        if torch.is_grad_enabled() and t.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad, and there is no backward; "
                "call it under torch.no_grad() or torch.inference_mode()"
            )
    if min(q.shape) < 1:
        raise ShapeError(f"q, k and v must not be empty, got shape {tuple(q.shape)}")
    allowed = (torch.bfloat16, torch.float16) + ((torch.float32,) if q.device.type == "cpu" else ())
    if q.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ShapeError(f"dtype must be one of {names} on {q.device.type}, got {q.dtype}; cast q, k and v first")
    if q.device.type not in ("cpu", "cuda"):
        raise ShapeError(f"tensors must be on cpu or cuda, got {q.device}")
    if q.shape[3] % 8:
        raise ShapeError(f"head_dim must be a multiple of 8, got {q.shape[3]}; pad the heads")


def check_choices(kernel: str, exchange: str, timeout_s: float) -> None:
    if kernel != "auto" and kernel not in kernels.KERNELS:
        raise ConfigurationError(f"kernel must be 'auto' or one of {', '.join(kernels.KERNELS)}, got {kernel!r}")
    if exchange != "auto" and exchange not in EXCHANGES:
        raise ConfigurationError(f"exchange must be 'auto' or one of {', '.join(EXCHANGES)}, got {exchange!r}")
    check_deadline(timeout_s)


def is_deadline(timeout_s: object) -> bool:
    return isinstance(timeout_s, (int, float)) and 0 < timeout_s < float("inf")


def check_deadline(timeout_s: object) -> None:
    if not is_deadline(timeout_s):
        raise ConfigurationError(f"timeout_s must be a positive number of seconds, got {timeout_s}")


def make_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    *,
    kernel: str,
    exchange: str,
    scale: float | None,
    with_lse: bool,
    head_sharded: bool,
) -> Request:
    """Checks the arguments of this rank and describes them. Raises ShapeError, UnsupportedError, ConfigurationError."""
    check_tensors(q, k, v)
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ConfigurationError(f"scale must be a finite number or None, got {scale!r}")
    batch, seq, heads, head_dim = q.shape
    request = Request(
        batch=batch,
        seq_len=seq if head_sharded else seq * group.size,
        num_heads=heads * group.size if head_sharded else heads,
        head_dim=head_dim,
        dtype=str(q.dtype).removeprefix("torch."),
        device=q.device.type,
        kernel=kernel,
        exchange=exchange,
        scale=head_dim**-0.5 if scale is None else float(scale),
        with_lse=with_lse,
        head_sharded=head_sharded,
    )
    request.shape(group.size)
    return request
