"""UlyssesAttention on real CPU processes against float64 attention in one process."""

import pytest
import torch
import workers


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("exchange", ["fused", "collective"])
def test_equals_attention_in_one_process(ranks, size, exchange):
    for out, error in ranks(size).run(workers.layer, seq=16 * size, heads=8, kernel="cpu", exchange=exchange):
        assert error < 1e-5
        assert out.shape == (1, 16, 8, 32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("batch", "seq", "dim"), [(1, 256, 64), (2, 72, 128), (3, 130 * 2, 16)])
def test_fused_equals_serial_bitwise(ranks, dtype, batch, seq, dim):
    shape = {"batch": batch, "seq": seq, "heads": 4, "dim": dim, "dtype": dtype}
    fused = ranks(2).run(workers.layer, kernel="cpu", exchange="fused", **shape)
    serial = ranks(2).run(workers.layer, kernel="cpu", exchange="collective", **shape)
    for (a, _), (b, _) in zip(fused, serial):
        assert torch.equal(a, b)
