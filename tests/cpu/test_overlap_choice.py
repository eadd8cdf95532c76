"""Where the overlapped form is chosen, without a GPU: the model's answer for the H200's 132 SMs."""

from types import SimpleNamespace

import pytest
import torch

from fa_a2a.layout import ExchangeShape
from fa_a2a.ops import overlap_schedule


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def loss(seq_len, num_ranks):
    return overlap_schedule.loss(ExchangeShape(1, seq_len, 24, 128, num_ranks, 2), torch.device("cuda", 0))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("seq_len", [8192, 16384, 32768])
def test_long_sequences_pay(seq_len, num_ranks):
    assert loss(seq_len, num_ranks) is None


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_short_ones_do_not_and_the_reason_has_both_times(num_ranks):
    reason = loss(1024, num_ranks)
    assert reason is not None
    assert "us of it inside attention, and" in reason


def test_own_tiles_fill_whole_waves():
    shape = ExchangeShape(1, 8192, 24, 128, 2, 2)
    assert overlap_schedule.schedule(shape, 128, 132).own_first == 264
    short = ExchangeShape(1, 4608, 24, 128, 2, 2)
    assert overlap_schedule.schedule(short, 128, 132).own_first == 12 * 18, "all there are"


def exposed_us(shape, choice):
    return overlap_schedule.prediction(shape, 128, 132, choice).exposed_us


@pytest.mark.parametrize(
    ("num_ranks", "heads", "seq_len", "gain_us"), [(8, 24, 8192, 5), (8, 24, 16384, 10), (4, 40, 32768, 30)]
)
def test_what_whole_waves_leave_to_see_is_searched_more_finely(num_ranks, heads, seq_len, gain_us):
    shape = ExchangeShape(1, seq_len, heads, 128, num_ranks, 2)
    chosen = overlap_schedule.schedule(shape, 128, 132)
    own, parts = shape.local_heads * -(-shape.local_seq // 128), max(1, 8 // num_ranks)
    coarse = [
        overlap_schedule.Schedule(count, parts, ahead, chosen.send_pace_ns)
        for count in {0, *(min(own, waves * 132) for waves in (1, 2, 3)), own}
        for ahead in (0, 1, num_ranks - 1)
    ]
    assert exposed_us(shape, chosen) < min(exposed_us(shape, choice) for choice in coarse) - gain_us


@pytest.mark.parametrize(("num_ranks", "heads"), [(2, 24), (4, 24), (8, 32)])
def test_where_nothing_shows_groups_of_heads_stay_few(num_ranks, heads):
    shape = ExchangeShape(1, 32768, heads, 128, num_ranks, 2)
    chosen = overlap_schedule.schedule(shape, 128, 132)
    assert chosen.kv_parts == max(1, 8 // num_ranks) and exposed_us(shape, chosen) < 0.5
