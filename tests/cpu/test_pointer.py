"""Tensors over raw addresses."""

import gc

import pytest
import torch

from fa_a2a.comm import pointer
from fa_a2a.comm.pointer import bytes_at, tensor_at

CPU = torch.device("cpu")


def test_bytes_share_the_memory():
    owner = torch.arange(64, dtype=torch.uint8)
    view = bytes_at(owner.data_ptr() + 8, 16, CPU)
    assert view.dtype == torch.uint8
    assert torch.equal(view, owner[8:24])
    view[3] = 200
    assert owner[11] == 200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensor_shares_the_memory_and_dtype(dtype):
    owner = torch.arange(24, dtype=dtype)
    view = tensor_at(owner.data_ptr(), (2, 3, 4), (12, 4, 1), dtype, CPU)
    assert view.dtype == dtype
    assert torch.equal(view, owner.view(2, 3, 4))
    view[1, 2, 3] = 99
    assert owner[23] == 99


def test_strides_step_from_one_allocation_to_another():
    """What the peers' mappings are: parts of a tensor in separate allocations at one distance."""
    store = torch.zeros(1000)
    first, second = store[100:112].view(3, 4), store[600:612].view(3, 4)
    both = tensor_at(first.data_ptr(), (2, 3, 4), (500, 4, 1), torch.float32, CPU)
    both[0], both[1] = 1.0, 2.0
    assert (first == 1).all()
    assert (second == 2).all()
    assert store.sum() == 36


def test_zero_stride_repeats():
    row = torch.arange(4.0)
    assert torch.equal(tensor_at(row.data_ptr(), (3, 4), (0, 1), torch.float32, CPU), row.expand(3, 4))


def test_unknown_dtype_is_refused():
    with pytest.raises(KeyError):
        tensor_at(0, (1,), (1,), torch.float64, CPU)


def test_deleter_runs_when_the_last_view_ends():
    gc.collect()
    before = dict(pointer._alive)
    owner = torch.zeros(64)
    view = tensor_at(owner.data_ptr(), (4, 16), (16, 1), torch.float32, CPU)
    part = view[2]
    assert len(pointer._alive) == len(before) + 1
    del view
    gc.collect()
    assert len(pointer._alive) == len(before) + 1  # `part` still uses it
    del part
    gc.collect()
    assert pointer._alive == before


def test_many_views_leave_nothing_behind():
    gc.collect()
    before = len(pointer._alive)
    owner = torch.zeros(8)
    for i in range(1000):
        assert bytes_at(owner.data_ptr(), 1 + i % 32, CPU).numel() == 1 + i % 32
    gc.collect()
    assert len(pointer._alive) == before
