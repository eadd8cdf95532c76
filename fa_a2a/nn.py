"""UlyssesAttention: what stands where a model's attention was."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .comm.group import Group, resolve
from .errors import FaA2AError
from .ops import schema
from .ops.arguments import flag_problem, scale_problem, unknown_problem
from .ops.deadlines import deadline
from .ops.functional import find_plan, whole_layer
from .ops.norm_rope import NormRope
from .ops.options import PLAIN, Options, problem
from .ops.plan import Plan, check_choices
from .ops.request import grad_problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class UlyssesAttention(torch.nn.Module):
    """Sequence-parallel attention: tokens are sharded over the ranks outside, heads inside.

    group: a ProcessGroup, a one-dimensional DeviceMesh (an axis of a larger one), or None for the default group, looked
        up at the first call; the module may be built before torch.distributed is initialised.
    kernel: "auto", "fa4", "fa3", "torch" or "cpu": which attention. exchange: "auto", "overlapped" (one kernel for the
        layer: it also sends q, k, v, and computes on what is here while the rest comes), "fused" (the kernel stores its
        output into the owners' memory) or "collective" (torch.distributed). "auto" may fall back and logs the reason
        once; a name never falls back.
    copy: return an ordinary tensor. False returns a view of the workspace where the path has one: valid until the next
        call on the same group, by whichever module.
    timeout_s: deadline for the peers in seconds, FA_A2A_TIMEOUT_S or 30 by default.

    The module has no parameters. `last_plan` says what the last eager call did and why. Under torch.compile the
    output is always an ordinary tensor. Source: arXiv:2309.14509 (Ulysses), arXiv:2607.23264 (fused exchange).
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None = None,
        kernel: str = "auto",
        exchange: str = "auto",
        copy: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self.timeout_s = deadline(timeout_s)
        check_choices(kernel, exchange, self.timeout_s)
        if (refused := flag_problem("copy", copy)) is not None:
            raise refused
        self.kernel, self.exchange, self.copy = kernel, exchange, copy
        self.last_plan: Plan | None = None
        self._requested_group = group
        self._group: Group | None = None
        self._world: object = None  # the default group that `_group` was looked up under

    def extra_repr(self) -> str:
        return f"kernel={self.kernel!r}, exchange={self.exchange!r}, copy={self.copy}, timeout_s={self.timeout_s:g}"

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _name(self) -> str:
        return resolve(self._requested_group).name

    def forward(
        self,
        q_BsHD: torch.Tensor,
        k_BsHD: torch.Tensor,
        v_BsHD: torch.Tensor,
        scale: float | None = None,
        causal: bool = False,
        key_lengths: torch.Tensor | Sequence[int] | None = None,
        shard_sizes: Sequence[int] | None = None,
        replicated_text: int | None = None,
        return_lse: bool = False,
        whole_kv: bool = False,
        norm_rope: NormRope | None = None,
        **unknown: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """q, k, v: (batch, rows, heads, head_dim), this rank's tokens of all heads. The rows are seq/P, or as
        shard_sizes says. k and v may have fewer heads, by a factor (grouped-query attention), and heads need not divide
        by P: some ranks then compute one more.

        scale: factor of the scores, head_dim**-0.5 by default.
        causal: token i of the whole sequence sees tokens 0 to i.
        key_lengths: the keys of each batch entry that take part, counted from the beginning of the whole sequence; for
            keys padded at the end. A list or an integer tensor (a GPU's is read by the host, which waits for it).
        shard_sizes: tokens of each rank, in rank order, for shards that are not equal, such as torch.tensor_split's.
        replicated_text: q, k and v begin (n > 0) or end (n < 0) with |n| rows of text that every rank holds, beside its
            own tokens (joint attention). They count once in the sequence, and out has them on every rank.
        return_lse: also return the log-sum-exp (batch, heads, rows) float32.
        whole_kv: k and v are the whole ones on every rank (cross-attention). Nothing is exchanged; q may have any rows.
        norm_rope: fa_a2a.NormRope: RMS-norm and rotary embedding of q and k. The kernel of the fused exchange applies
            them as it stores (equal shards), else torch operations do; the overlapped exchange takes none.
        Returns (batch, rows, heads, head_dim). Raises like `scatter_heads`, under torch.compile, too, which takes plain
        numbers only, not numpy's. An argument of another name on one rank is an error on all.
        """
        absent = key_lengths is None and shard_sizes is None and replicated_text is None and norm_rope is None
        options = PLAIN
        if not absent or causal is not False or whole_kv is not False:
            options = Options(causal, key_lengths, shard_sizes, replicated_text, whole_kv, norm_rope)
        refused = unknown_problem(unknown) if unknown else None
        if torch.compiler.is_compiling():
            return self._traced(q_BsHD, k_BsHD, v_BsHD, scale, return_lse, options, refused)
        group, seconds = self._resolve(), self.timeout_s
        kernel, exchange = self.kernel, self.exchange
        plan = find_plan(
            group, q_BsHD, k_BsHD, v_BsHD, scale, return_lse, kernel, exchange, seconds, False, options, refused
        )
        if self.last_plan is not plan:
            self.last_plan = plan
        result, lse_or_none = whole_layer(group, plan, (q_BsHD, k_BsHD, v_BsHD), self.copy, seconds, norm_rope)
        if return_lse:
            assert lse_or_none is not None
            return result, lse_or_none
        return result

    def _traced(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        return_lse: bool,
        options: Options,
        refused: FaA2AError | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The call as torch.compile sees it. What is refused is refused by the operator when it runs, since it can tell
        the other ranks."""
        causal, lengths, sizes, text, whole_kv, norm_rope = options
        where = (self._name(), self.kernel, self.exchange)
        refused = refused or problem(options) or scale_problem(scale) or flag_problem("return_lse", return_lse)
        refused = refused or grad_problem(q, k, v)
        if norm_rope is not None and q.dim() != 4:
            norm_rope = None  # the operator refuses q
        if refused is None and norm_rope is not None:  # applied here, for the compiler to fuse
            refused = norm_rope.refusal(q)
        if refused is not None:
            told = type(refused).__name__ + ": " + refused.args[0]  # the compiler takes no f-string of an error
            return schema.ulysses_attention(q, k, v, *where, None, False, self.timeout_s, refused=told)[0]  # type: ignore[no-any-return]
        if norm_rope is not None:
            q, k = norm_rope.applied(q, k)
        if lengths is not None and not isinstance(lengths, torch.Tensor):
            lengths = torch.tensor(lengths)
        both: tuple[torch.Tensor, torch.Tensor] = schema.ulysses_attention(
            *(q, k, v, *where, scale, return_lse, self.timeout_s, causal, lengths, sizes, text, whole_kv)
        )
        return both if return_lse else both[0]

    def _resolve(self) -> Group:
        """The group, looked up anew only when torch.distributed was initialised anew."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._group is None or world is None or world is not self._world:
            self._group, self._world = resolve(self._requested_group), world
        return self._group

    def __deepcopy__(self, memo: dict[int, object]) -> UlyssesAttention:
        """A copy of a model shares its process group."""
        copied = type(self).__new__(type(self))
        memo[id(self)], memo[id(self._requested_group)] = copied, self._requested_group
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Without what was looked up in this process: a module can be pickled after its first call as before it, unless
        it was given a group, which no process can hand to another."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"_group": None, "_world": None, "last_plan": None}
