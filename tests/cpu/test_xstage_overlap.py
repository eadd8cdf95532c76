"""The model of the overlapped exchange, against cases that can be worked out by hand."""

import pytest
from fa4_a2a.overlap import send_order

from fa_a2a.layout import ExchangeShape
from fa_a2a.ops import overlap_schedule as overlap
from fa_a2a.xstage.overlap import SIGNAL_US, predict

ONE = {"num_ranks": 2, "rows": 128, "heads": 1, "head_dim": 128, "tile_rows": 128, "kv_parts": 1, "tile_us": 10.0}
PART_US = 2 * 128 * 128 * 2 / 1e3  # keys and values at 1 GB/s


def one(**changes):
    """Two tiles, own and remote, on one SM or two."""
    sends = send_order(2, 1, changes.pop("queries_first", 0), own=False)
    return predict(**{**ONE, "sends": sends, "own_first": 1, "num_sms": 1, "rate_gb_s": 1.0, **changes})


def test_one_sm_waits_for_keys_in_its_first_tile_then_for_queries():
    found = one()
    assert found.alone_us == 20
    assert found.sends_us == pytest.approx(1.5 * PART_US)
    assert found.makespan_us == pytest.approx(SIGNAL_US + 1.5 * PART_US + 10)


def test_queries_first_delay_the_keys():
    found = one(queries_first=1)
    keys_us = SIGNAL_US + 1.5 * PART_US
    assert found.makespan_us == pytest.approx(keys_us + 5 + 10)
    assert one(own_first=0, queries_first=1).makespan_us == pytest.approx(keys_us + 5 + 10)


def test_the_own_rows_that_are_copied_cost_no_path():
    with_own = [(0, 0), *send_order(2, 1, 0, own=False)]
    assert one(sends=with_own) == one()


def test_nothing_shows_on_a_fast_path_but_the_signal():
    found = one(rate_gb_s=1e6, num_sms=2)
    assert found.exposed_us == pytest.approx(SIGNAL_US, abs=1e-3), "the remote tile waits for its queries"
    assert one(rate_gb_s=1e6).exposed_us == pytest.approx(SIGNAL_US - 5, abs=1e-3), "own keys take 5 us of that"


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("seq_len", [4608, 8192, 16384])
def test_the_choice_is_the_best_of_those_it_weighs(num_ranks, seq_len):
    shape = ExchangeShape(1, seq_len, 24, 128, num_ranks, 2)
    chosen = overlap.schedule(shape, 128, 132)
    best = overlap.prediction(shape, 128, 132, chosen)
    for own_first in (0, 132):
        for queries_first in (0, 1):
            other = chosen._replace(own_first=own_first, queries_first=queries_first)
            assert best.exposed_us <= overlap.prediction(shape, 128, 132, other).exposed_us + 0.5
    assert best.exposed_us < best.sends_us, "or the exchange had better come before attention"


@pytest.mark.parametrize(("seq_len", "exposed_us"), [(4608, 15), (8192, 20), (16384, 1), (32768, 1)])
def test_what_is_expected_of_four_gpus(seq_len, exposed_us):
    shape = ExchangeShape(1, seq_len, 24, 128, 4, 2)
    assert overlap.prediction(shape, 128, 132, overlap.schedule(shape, 128, 132)).exposed_us < exposed_us
