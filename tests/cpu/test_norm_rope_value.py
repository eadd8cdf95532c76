"""What NormRope refuses by itself."""

import pytest
import torch

from fa_a2a import NormRope
from fa_a2a.errors import ShapeError, UnsupportedError

W, T = torch.ones(16), torch.ones(4, 16)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, "neither weights nor tables"),
        ({"q_weight": W}, "both or neither"),
        ({"cos": T}, "both or neither"),
        ({"q_weight": W, "k_weight": W.half()}, "one dtype"),
        ({"q_weight": W[None], "k_weight": W[None]}, "(head_dim,)"),
        ({"cos": T, "sin": T[1:]}, "seq/P"),
        ({"cos": T.double(), "sin": T.double()}, "bfloat16, float16 or float32"),
        ({"q_weight": W, "k_weight": W, "eps": float("nan")}, "eps"),
        ({"q_weight": W, "k_weight": W, "eps": -1.0}, "eps"),
        ({"q_weight": [1.0] * 16, "k_weight": [1.0] * 16}, "must be tensors, got list, list"),
        ({"cos": T, "sin": T, "interleaved": "no"}, "interleaved must be True or False, got 'no'"),
    ],
)
def test_refused(given, rule):
    with pytest.raises(ShapeError) as caught:
        NormRope(**given)
    assert rule in str(caught.value)


def test_weights_that_require_grad_are_refused_in_grad_mode():
    weight = torch.nn.Parameter(W)
    both, q = NormRope(weight, weight), torch.zeros(1, 4, 2, 16)
    with pytest.raises(UnsupportedError, match="require grad, and there is no backward"):
        both.check(q)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            both.check(q)


def test_result_keeps_the_dtype_and_rounds_once():
    x = torch.randn(1, 4, 2, 16).bfloat16()
    both = NormRope(W, W, cos=T, sin=0 * T)
    out, _ = both.applied(x, x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.nn.functional.rms_norm(x.float(), (16,), W, 1e-6).bfloat16())
