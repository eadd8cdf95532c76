"""Which masks are key lengths, when the host looks, and what a graph refuses."""

import pytest
import torch

from fa_a2a.errors import ConfigurationError
from fa_a2a.integrations import host_reads
from fa_a2a.integrations.host_reads import Lengths, Watch


@pytest.fixture
def reads(monkeypatch):
    """The masks that were read from their devices."""
    seen, read = [], host_reads._read
    monkeypatch.setattr(host_reads, "_read", lambda mask: seen.append(mask) or read(mask))
    return seen


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "want"),
    [
        ([[1, 1, 0], [1, 0, 0]], Lengths((2, 1), True)),
        ([[1, 1, 1]], Lengths((3,), True)),
        ([[0, 0, 0], [1, 1, 1]], Lengths((0, 3), True)),
        ([[1, 0, 1], [1, 1, 0]], Lengths((2, 2), False)),
        ([[0, 1, 1]], Lengths((2,), False)),
        ([[1], [0]], Lengths((1, 0), True)),
    ],
)
def test_what_a_mask_says(rows, want, dtype):
    assert host_reads.lengths(torch.tensor(rows).to(dtype)) == want


def test_a_bias_is_no_mask():
    for values in ([[0.0, -1e4]], [[1.0, 0.5]], [[2, 0]]):
        assert host_reads.lengths(torch.tensor(values)) is None


def test_each_mask_is_read_once_until_it_is_written_to(reads):
    mask, twin = torch.ones(1, 4), torch.ones(1, 4)
    for x in (mask, mask, twin, mask):
        assert host_reads.lengths(x).counts == (4,)
    assert len(reads) == 2
    mask[0, 3] = 0
    assert [host_reads.lengths(mask).counts for _ in range(2)] == [(3,), (3,)]
    assert len(reads) == 3


def test_inference_tensors_are_read_each_time(reads):
    with torch.inference_mode():
        mask = torch.ones(1, 4)
        assert host_reads.lengths(mask).counts == (4,)
        mask[0, 3] = 0
        assert host_reads.lengths(mask).counts == (3,)


def watched(mask, *arguments):
    watch = Watch()
    with watch.open():
        host_reads.lengths(mask)
    watch.check_among([mask, *arguments])
    return watch


@pytest.mark.parametrize("inference", [False, True])
def test_a_graph_takes_no_other_mask(inference):
    with torch.inference_mode(inference):
        mask = torch.tensor([[1, 1, 0]])
        watch = watched(mask)
        assert watch.covers(mask) and not watch.covers(mask.clone())
        given = mask.clone()
        for _ in range(2):
            watch.check_same("mask", mask, given)
        given[0, 1] = 0
        with pytest.raises(ConfigurationError, match="mask says which keys take part"):
            watch.check_same("mask", mask, given)


def test_a_capture_reads_nothing_that_its_warm_up_has_read(reads):
    with torch.inference_mode():
        mask, watch = torch.ones(1, 4), Watch()
        with watch.open():
            for _ in range(3):
                host_reads.lengths(mask)
    assert len(reads) == 1


def test_a_mask_made_inside_the_model_cannot_be_watched():
    watch = Watch()
    with watch.open():
        host_reads.lengths(torch.ones(1, 4))
    with pytest.raises(ConfigurationError, match="none of GraphedForward's arguments"):
        watch.check_among([torch.ones(1, 4), 3])
