"""RMS-norm and rotary embedding inside a call: equal to the same done before it, on every path."""

import pytest
import torch
import torch.nn.functional as F
from workers import attempt, inputs

from fa_a2a import NormRope, UlyssesAttention, attention_gather, scatter_heads

ROWS, DIM = 12, 16


def values(rank, interleaved, pairs, norm=True, rope=True):
    """Weights that all ranks share, tables of this rank's tokens."""
    generator = torch.Generator().manual_seed(4)
    weights = [1 + 0.1 * torch.randn(DIM, generator=generator) for _ in range(2)]
    angle = torch.randn(8 * ROWS, DIM // 2, generator=generator)[rank * ROWS : (rank + 1) * ROWS]
    if not pairs:
        angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
    given = dict(zip(("q_weight", "k_weight"), weights)) if norm else {}
    return NormRope(**given, **({"cos": angle.cos(), "sin": angle.sin()} if rope else {}), interleaved=interleaved)


def separately(x, weight, cos, sin, interleaved):
    """In complex numbers: another way than the library's."""
    x = x.double()
    if weight is not None:
        x = F.rms_norm(x, (DIM,), weight.double(), 1e-6)
    if cos is None:
        return x
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    if cos.shape[-1] == DIM:
        cos, sin = (t[:, ::2] if interleaved else t[:, : DIM // 2] for t in (cos, sin))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double())[:, None]
    back = torch.view_as_real(turned)
    return (back if interleaved else back.transpose(-1, -2)).flatten(-2)


def inside_and_before(rank, size, interleaved, pairs, norm, rope):
    """Largest differences: of the layer on each exchange, of its halves, and compiled."""
    q, k, v = inputs(rank, size, rows=ROWS, dim=DIM)
    both = values(rank, interleaved, pairs, norm, rope)
    before = [
        separately(x, w, both.cos, both.sin, interleaved).float() for x, w in ((q, both.q_weight), (k, both.k_weight))
    ]
    want = UlyssesAttention(kernel="cpu", exchange="collective", copy=True)(*before, v)
    outs = [
        UlyssesAttention(kernel="cpu", exchange=e)(q, k, v, norm_rope=both).clone() for e in ("fused", "collective")
    ]
    outs.append(attention_gather(scatter_heads(q, k, v, kernel="cpu", norm_rope=both), copy=True)[0])
    layer = UlyssesAttention(kernel="cpu")
    outs.append(torch.compile(lambda *x: layer(*x, norm_rope=both), fullgraph=True, backend="eager")(q, k, v))
    plain = UlyssesAttention(kernel="cpu")(q, k, v)
    return [(out - want).abs().max().item() for out in outs], (plain - want).abs().max().item()


@pytest.mark.parametrize(
    ("interleaved", "pairs", "norm", "rope"),
    [(True, True, True, True), (True, False, False, True), (False, True, True, True), (False, False, True, False)],
)
@pytest.mark.parametrize("size", [2, 8])
def test_inside_equals_before(ranks, size, interleaved, pairs, norm, rope):
    options = {"interleaved": interleaved, "pairs": pairs, "norm": norm, "rope": rope}
    for inside, without in ranks(size).run(inside_and_before, **options):
        assert max(inside) < 2e-6
        assert without > 1e-2  # it does something


def compiled_for_other_rows(rank, size, dynamic):
    torch._dynamo.reset()
    layer, differences = UlyssesAttention(kernel="cpu", copy=True), []
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (8, 12, 9, 11):
        parts, angle = inputs(rank, size, rows=rows, dim=DIM), torch.arange(rows * DIM).view(rows, DIM)
        both = NormRope(cos=angle.cos(), sin=angle.sin()) if rows in (9, 11) else None  # q's rows a symbol first
        differences.append((fast(*parts, norm_rope=both) - layer(*parts, norm_rope=both)).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("dynamic", [None, True])
def test_rows_that_change_under_compile(ranks, dynamic):
    assert max(ranks(2).run(compiled_for_other_rows, dynamic=dynamic)) < 2e-6


def wrong(rank, size):
    q, k, v = inputs(rank, size, rows=ROWS, dim=DIM)
    layer = UlyssesAttention(kernel="cpu", timeout_s=20)
    good = values(rank, True, True)
    cases = {
        "rows": NormRope(cos=good.cos[1:], sin=good.sin[1:]),
        "weight": NormRope(q_weight=torch.ones(8), k_weight=torch.ones(8)),
        "kind": "rope",
        "grad": NormRope(*(torch.nn.Parameter(w) for w in (good.q_weight, good.k_weight))),
        "one rank's eps": NormRope(good.q_weight, good.k_weight, eps=1e-5 if rank else 1e-4),
    }
    found = {name: attempt(layer, q, k, v, norm_rope=case) for name, case in cases.items()}
    found["whole_kv"] = attempt(layer, q, k, v, norm_rope=good, whole_kv=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    found["whole_kv, compiled"] = attempt(compiled, q, k, v, norm_rope=good, whole_kv=True)
    found["works after"] = attempt(layer, q, k, v, norm_rope=good)
    return found


def test_wrong_values_are_one_error_everywhere(ranks):
    for found in ranks(2).run(wrong):
        assert {name: outcome.error for name, outcome in found.items()} == {
            "rows": "ShapeError",
            "weight": "ShapeError",
            "kind": "ConfigurationError",
            "grad": "UnsupportedError",
            "one rank's eps": "PeerMismatchError",
            "whole_kv": "UnsupportedError",
            "whole_kv, compiled": "UnsupportedError",
            "works after": "",
        }
        assert f"({ROWS}, {DIM})" in found["rows"].text and f"({ROWS - 1}, 8)" in found["rows"].text
        assert all(outcome.seconds < 15 for outcome in found.values())
