"""`fa-a2a audit --kernel`: each design in words, its terms, and a simulated launch."""

import pytest

from fa_a2a.cli import main
from fa_a2a.xstage import DESIGNS

SHAPE = ("audit", "--seq-len", "4608", "--heads", "24")


def test_every_design_in_words(capsys):
    assert main([*SHAPE, "--kernel", "all"]) == 0
    out = capsys.readouterr().out
    for name, design in DESIGNS.items():
        assert f"{name}: {design.words}" in out
    assert out.count("simulated launch, all SMs in step") == len(DESIGNS)
    assert "     2.8 us  30 remote tiles leave behind the end" in out
    assert "cost: sender-visible 7.8 us, ready 13.8 us (publication boundary: 6.0)" in out


def test_two_ranks_and_another_tile(capsys):
    assert main([*SHAPE, "--kernel", "persistent", "--profile", "h200x2"]) == 0
    assert "cost: sender-visible 0.0 us, ready 3.5 us (publication inside: 3.5)" in capsys.readouterr().out
    assert main([*SHAPE, "--kernel", "stock", "--tile-rows", "192"]) == 0
    assert "tiles of 192 rows" in capsys.readouterr().out
    assert main([*SHAPE, "--kernel", "stock", "--profile", "paper"]) == 0
    assert "ready unknown (the profile has no such publication time)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--own-chunk", "first"), "'persistent' takes its own chunk last, got --own-chunk first"),
        (("--head-dim", "96"), "for head_dim 128, 64, got 96"),
        (("--ranks", "2", "--profile", "h200x4"), "is for 4 ranks; got 2"),
        (("--ranks", "3"), "no shipped profile is for 3 ranks"),
        (("--ranks", "0"), "--ranks must be at least 1, got 0"),
        (("--tile-rows", "0"), "tile_rows must be at least 1"),
    ],
)
def test_refusals(capsys, options, message):
    assert main([*SHAPE, "--kernel", "persistent", *options]) == 1
    assert message in capsys.readouterr().err
