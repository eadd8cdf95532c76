"""The overlapped exchange where no kernel has it: one clear error on every rank, and never a silent fallback."""

import workers


def layer(rank, size, **options):
    from fa_a2a import UlyssesAttention

    attention = UlyssesAttention(**options)
    return workers.attempt(attention, *workers.inputs(rank, size))


def halves(rank, size):
    from fa_a2a import scatter_heads

    return workers.attempt(scatter_heads, *workers.inputs(rank, size), exchange="overlapped")


def test_named_it_is_refused_on_cpus(ranks):
    for outcome in ranks(2).run(layer, kernel="cpu", exchange="overlapped"):
        assert outcome.error == "UnsupportedError"
        assert "needs kernel 'fa4' on a GPU of compute capability 9.0; use exchange='fused'" in outcome.text


def test_auto_takes_another_path(ranks):
    assert [outcome.error for outcome in ranks(2).run(layer)] == ["", ""]


def test_it_has_no_halves(ranks):
    for outcome in ranks(2).run(halves):
        assert outcome.error == "ConfigurationError"
        assert "whole layer" in outcome.text
