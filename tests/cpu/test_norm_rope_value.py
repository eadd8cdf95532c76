"""What NormRope refuses by itself."""

import pytest
import torch

from fa_a2a import NormRope
from fa_a2a.errors import ShapeError

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
    ],
)
def test_refused(given, rule):
    with pytest.raises(ShapeError) as caught:
        NormRope(**given)
    assert rule in str(caught.value)


def test_result_keeps_the_dtype_and_rounds_once():
    x = torch.randn(1, 4, 2, 16).bfloat16()
    both = NormRope(W, W, cos=T, sin=0 * T)
    out, _ = both.applied(x, x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.nn.functional.rms_norm(x.float(), (16,), W, 1e-6).bfloat16())
