"""One call's configuration as a rank passes it, and the checks that need no other rank.

A Request is what the ranks must agree on, so it holds nothing that may differ between them: the rows of every rank, not
of this one, and values, not tensors. It is compared once, over the host channel, and its fingerprint travels with every
call. So a rank that passes other shard sizes, key lengths or text rows ends the call everywhere, like one with another
dtype. A rank knows its own rows only: without `shard_sizes` all ranks hold as many, and sizes that differ are an error
that says which `shard_sizes` to pass. They are not guessed from what the ranks hold: one row missing on one rank by
mistake would look just like torch.tensor_split's shards.

Under a CUDA graph nothing of this is looked at: sizes and lengths are those of the capture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..comm.group import Group
from ..config import MOST
from ..errors import ConfigurationError, FaA2AError, ShapeError, UnsupportedError
from ..layout import ExchangeShape
from . import kernels
from .arguments import flag_problem, is_finite, is_number, scale_problem, shown
from .options import PLAIN, Checked, Options, checked

EXCHANGES = ("overlapped", "fused", "collective")


@dataclass(frozen=True)
class Request:
    """One call's configuration, the same on every rank. Shapes are those of the whole exchange.

    seq_len counts replicated text once; with whole_kv, where queries are no business of the other ranks, it counts the
    keys. shard_sizes: None for equal shards. key_lengths: None for all keys.
    """

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
    num_kv_heads: int = 0
    causal: bool = False
    key_lengths: tuple[int, ...] | None = None
    shard_sizes: tuple[int, ...] | None = None
    replicated_text: int = 0
    whole_kv: bool = False
    norm_rope: tuple[str, ...] | None = None  # its layout

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def is_plain(self) -> bool:
        """All queries to all keys: what the X-Stage model knows."""
        return not (self.causal or self.key_lengths or self.whole_kv)

    def shape(self, num_ranks: int) -> ExchangeShape:
        """With whole_kv nothing is exchanged: the shape is that of one rank by itself."""
        return ExchangeShape(
            self.batch,
            self.seq_len,
            self.num_heads,
            self.head_dim,
            1 if self.whole_kv else num_ranks,
            self.torch_dtype.itemsize,
            self.num_kv_heads,
            self.shard_sizes,
            self.replicated_text,
        )


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole_kv: bool = False) -> None:
    """Raises ShapeError or UnsupportedError for inputs that no path takes. Peers are compared later."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor) or t.dim() != 4:
            got = f"{t.dim()} dimensions" if isinstance(t, torch.Tensor) else type(t).__name__
            raise ShapeError(f"{name} must be a tensor (batch, seq, heads, head_dim), got {got}")
        if hasattr(t, "to_local"):
            raise ShapeError(
                f"{name} must be a tensor of this rank's own tokens, got {type(t).__name__}; pass .to_local()"
            )
        if (told := _without_values(t)) is not None:
            raise ShapeError(f"{name} must be a tensor with values of its own, got {type(t).__name__}; {told}")
        if t.layout != torch.strided:
            raise ShapeError(f"{name} must be a dense tensor, got layout {t.layout}")
        if t.dtype != q.dtype or t.device != q.device:
            raise ShapeError(
                f"q, k and v must have one dtype and device; q has {q.dtype} on {q.device}, "
                f"{name} {t.dtype} on {t.device}"
            )
        if min(t.shape) < 1:
            raise ShapeError(f"{name} must not be empty, got shape {tuple(t.shape)}")
    if (refused := grad_problem(q, k, v)) is not None:
        raise refused
    _check_against_each_other(q, k, v, whole_kv)
    if q.device.type not in ("cpu", "cuda"):
        raise ShapeError(f"tensors must be on cpu or cuda, got {q.device}")
    allowed = (torch.bfloat16, torch.float16) + ((torch.float32,) if q.device.type == "cpu" else ())
    if q.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ShapeError(f"dtype must be one of {names} on {q.device.type}, got {q.dtype}; cast q, k and v first")
    if q.shape[3] % 8:
        raise ShapeError(f"head_dim must be a multiple of 8, got {q.shape[3]}; pad the heads")


def _without_values(t: torch.Tensor) -> str | None:
    """The way out for a tensor whose address kernels cannot load from; None for an ordinary one."""
    if type(t) is torch.Tensor:
        return None
    from torch._subclasses.fake_tensor import is_fake
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(t, AsyncCollectiveTensor):
        return "pass .wait() of it"
    return "call it outside of FakeTensorMode" if is_fake(t) else None  # type: ignore[no-untyped-call]


def grad_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> FaA2AError | None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.requires_grad and torch.is_grad_enabled():
            return UnsupportedError(
                f"{name} requires grad, and there is no backward; "
                "call it under torch.no_grad() or torch.inference_mode()"
            )
    return None


def _check_against_each_other(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole_kv: bool) -> None:
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(f"q, k and v must have one batch and head_dim, k and v one shape; got {shapes}")
    if q.shape[1] != k.shape[1] and not whole_kv:
        raise ShapeError(
            f"q, k and v must have the same tokens (self-attention); got {shapes}; for cross-attention give every rank "
            "the whole k and v, and whole_kv=True"
        )
    if q.shape[2] % k.shape[2]:
        raise ShapeError(f"the query heads must be a multiple of the key heads; got {shapes}")


def check_choices(kernel: str, exchange: str, timeout_s: float) -> None:
    if not isinstance(kernel, str) or kernel not in ("auto", *kernels.KERNELS):
        raise ConfigurationError(f"kernel must be 'auto' or one of {', '.join(kernels.KERNELS)}, got {shown(kernel)}")
    if not isinstance(exchange, str) or exchange not in ("auto", *EXCHANGES):
        raise ConfigurationError(f"exchange must be 'auto' or one of {', '.join(EXCHANGES)}, got {shown(exchange)}")
    check_deadline(timeout_s)


def is_deadline(timeout_s: object) -> bool:
    if not isinstance(timeout_s, float):
        timeout_s = float(timeout_s) if is_number(timeout_s) and is_finite(timeout_s) else 0.0  # type: ignore[arg-type]
    return 0 < timeout_s <= MOST


def check_deadline(timeout_s: object) -> None:
    if not is_deadline(timeout_s):
        raise ConfigurationError(
            f"timeout_s must be a positive number of seconds, at most {MOST:g}, got {shown(timeout_s)}"
        )


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
    options: Options = PLAIN,
) -> Request:
    """Checks the arguments of this rank and describes them. Raises ShapeError, UnsupportedError, ConfigurationError."""
    values = checked(options)
    check_tensors(q, k, v, values.whole_kv)
    if (refused := scale_problem(scale) or flag_problem("return_lse", with_lse)) is not None:
        raise refused
    batch, rows, heads, head_dim = q.shape
    times = group.size if head_sharded else 1
    request = Request(
        batch=batch,
        seq_len=k.shape[1] if values.whole_kv else _seq_len(rows, group, head_sharded, values),
        num_heads=heads * times,
        head_dim=head_dim,
        dtype=str(q.dtype).removeprefix("torch."),
        device=q.device.type,
        kernel=kernel,
        exchange=exchange,
        scale=head_dim**-0.5 if scale is None else float(scale),
        with_lse=with_lse,
        head_sharded=head_sharded,
        num_kv_heads=k.shape[2] * times,
        causal=values.causal,
        key_lengths=values.key_lengths,
        shard_sizes=values.shard_sizes if len(set(values.shard_sizes or ())) > 1 else None,
        replicated_text=values.replicated_text,
        whole_kv=values.whole_kv,
        norm_rope=values.norm_rope,
    )
    if options.norm_rope is not None:
        if head_sharded:
            raise UnsupportedError("norm_rope is for tensors that are sharded over the sequence; apply it before")
        options.norm_rope.check(q)
    shape = request.shape(group.size)
    if head_sharded and not shape.equal_heads:
        raise ShapeError(f"head-sharded tensors have the same heads on every rank, got {heads} of {shape.num_heads}")
    _check_key_lengths(request)
    return request


def _seq_len(rows: int, group: Group, head_sharded: bool, values: Checked) -> int:
    """Tokens of the whole sequence, replicated text once. Raises ShapeError where this rank's rows are not as told."""
    text, sizes = abs(values.replicated_text), values.shard_sizes
    if rows <= text:
        raise ShapeError(f"q, k and v hold the replicated text and own tokens: more than {text} rows, got {rows}")
    if sizes is not None and len(sizes) != group.size:
        raise ShapeError(f"shard_sizes must have a number for each of {group.size} ranks, got {list(sizes)}")
    if head_sharded:
        if sizes is not None and sum(sizes) + text != rows:
            raise ShapeError(f"shard_sizes={list(sizes)} must sum to q's rows but {text} of text; q has {rows} rows")
        return rows
    if sizes is None:
        return (rows - text) * group.size + text
    if rows != sizes[group.rank] + text:
        beside = f" and {text} rows of replicated text" if text else ""
        raise ShapeError(
            f"shard_sizes={list(sizes)} gives rank {group.rank} {sizes[group.rank]} tokens{beside}; q has {rows} rows"
        )
    return sum(sizes) + text


def _check_key_lengths(request: Request) -> None:
    lengths = request.key_lengths
    if lengths is None:
        return
    if len(lengths) != request.batch or min(lengths) < 1 or max(lengths) > request.seq_len:
        raise ShapeError(
            f"key_lengths must hold one number for each batch entry ({request.batch}), from 1 to the {request.seq_len} "
            f"keys of the whole sequence, got {list(lengths)}"
        )
