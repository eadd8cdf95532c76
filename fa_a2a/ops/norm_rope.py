"""RMS-norm of q and k over head_dim and their rotary embedding, which every DiT does right before the exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import FaA2AError, ShapeError, UnsupportedError
from .arguments import is_finite, is_number

KERNEL_HEAD_DIMS = (16, 32, 64, 128, 256)  # of the scattering kernel: heads that fill a power of two of lanes
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class NormRope:
    """What happens to q and k before they leave this rank: RMS-norm where weights are given, then rotary embedding
    where tables are.

    q_weight, k_weight: (head_dim,), both or neither. eps: added to the mean square.
    cos, sin: (seq/P, head_dim) or, one entry a pair, (seq/P, head_dim/2): rows of this rank's tokens; both or neither.
    interleaved: elements 2i and 2i + 1 turn together (Flux, Wan, QwenImage); False for i and i + head_dim/2.
    Arithmetic is in float32, and the result is rounded once: it may differ in the last bit from separate operations
    that round between. Weights and tables are bfloat16, float16 or float32.
    Raises ShapeError. Source: RoFormer (arXiv:2104.09864), RMSNorm (arXiv:1910.07467).
    """

    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        pairs = (("q_weight", "k_weight"), 1, "(head_dim,)"), (("cos", "sin"), 2, "(seq/P, head_dim or half)")
        for names, dims, rule in pairs:
            one, two = (getattr(self, name) for name in names)
            if (one is None) != (two is None):
                raise ShapeError(f"NormRope takes {names[0]} and {names[1]}, both or neither; got one of them")
            if one is None:
                continue
            if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)):
                got = ", ".join(type(t).__name__ for t in (one, two))
                raise ShapeError(f"NormRope's {names[0]} and {names[1]} must be tensors, got {got}")
            if one.shape != two.shape or one.dim() != dims or one.dtype != two.dtype:
                raise ShapeError(
                    f"NormRope's {names[0]} and {names[1]} must be {rule} and of one dtype; got {tuple(one.shape)} "
                    f"{one.dtype} and {tuple(two.shape)} {two.dtype}"
                )
            if one.layout != torch.strided or two.layout != torch.strided:
                raise ShapeError(f"NormRope's {names[0]} and {names[1]} must be dense, got {one.layout}, {two.layout}")
            if one.dtype not in _DTYPES:
                raise ShapeError(f"NormRope's {names[0]} must be bfloat16, float16 or float32, got {one.dtype}")
        if not isinstance(self.interleaved, bool):
            raise ShapeError(f"NormRope's interleaved must be True or False, got {self.interleaved!r}")
        if not is_number(self.eps) or not is_finite(self.eps) or self.eps < 0:
            raise ShapeError(f"NormRope's eps must be a finite number, 0 or more, got {self.eps!r}")
        if self.q_weight is None and self.cos is None:
            raise ShapeError("NormRope was given neither weights nor tables; leave norm_rope out")

    @property
    def layout(self) -> tuple[str, ...]:
        """What the ranks compare and a kernel is compiled for: dtype of the weights, kind of rotation, entries of the
        tables, their dtype, "" for what is absent; and eps."""
        weights = "" if self.q_weight is None else str(self.q_weight.dtype).removeprefix("torch.")
        if self.cos is None:
            return weights, "", "", "", str(self.eps)
        kind = "interleaved" if self.interleaved else "halves"
        return weights, kind, str(self.cos.shape[1]), str(self.cos.dtype).removeprefix("torch."), str(self.eps)

    @property
    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.q_weight, self.k_weight, self.cos, self.sin

    def problem(self, q: torch.Tensor) -> str | None:
        """Why this does not fit q and k (batch, rows, heads, head_dim) of this rank, or None."""
        rows, head_dim = q.shape[1], q.shape[3]
        if self.q_weight is not None and self.q_weight.shape[0] != head_dim:
            return f"NormRope's q_weight must have shape ({head_dim},), got {tuple(self.q_weight.shape)}"
        # torch.compile finds nothing in a tuple of symbols: no `in` here
        if self.cos is not None and not (
            self.cos.shape[0] == rows and (self.cos.shape[1] == head_dim or self.cos.shape[1] == head_dim // 2)
        ):
            return (
                f"NormRope's cos must have shape ({rows}, {head_dim}) or ({rows}, {head_dim // 2}), the rows of this "
                f"rank's tokens, got {tuple(self.cos.shape)}"
            )
        for t in self._tensors:
            if t is not None and t.device != q.device:
                return f"NormRope's tensors must be on q's device, {q.device}, got {t.device}"
        return None

    def check(self, q: torch.Tensor) -> None:
        """Raises what `refusal` returns."""
        if (refused := self.refusal(q)) is not None:
            raise refused

    def refusal(self, q: torch.Tensor) -> FaA2AError | None:
        """ShapeError where there is a problem, UnsupportedError for tensors that require grad in grad mode, or None."""
        if (problem := self.problem(q)) is not None:
            return ShapeError(problem)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self._tensors):
            return UnsupportedError(
                "NormRope's weights or tables require grad, and there is no backward; detach them, or call it under "
                "torch.no_grad() or torch.inference_mode()"
            )
        return None

    def applied(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k, normed and rotated by torch operations."""
        return self.apply(q, self.q_weight), self.apply(k, self.k_weight)

    def apply(self, x_BsHD: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """q or k with its weight, in torch operations: float32 inside, the input's dtype outside."""
        x = x_BsHD.float()
        if weight is not None:
            x = torch.nn.functional.rms_norm(x, x.shape[-1:], weight.float(), self.eps)
        if self.cos is not None and self.sin is not None:
            cos, sin = (self._whole(table, x.shape[-1])[:, None] for table in (self.cos, self.sin))
            x = x * cos + self._partner(x) * sin
        return x.to(x_BsHD.dtype)

    def _whole(self, table: torch.Tensor, head_dim: int) -> torch.Tensor:
        """(s, head_dim) float32, an entry for each element."""
        table = table.float()
        if table.shape[-1] == head_dim:
            return table
        return table.repeat_interleave(2, -1) if self.interleaved else torch.cat([table, table], -1)

    def _partner(self, x: torch.Tensor) -> torch.Tensor:
        """What each element turns with, negated for the first of the two."""
        if self.interleaved:
            first, second = x[..., ::2], x[..., 1::2]
            return torch.stack([-second, first], -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
