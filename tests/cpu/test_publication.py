"""What a calibration learns from its attention: publication times and attention's speed, from recorded lines."""

import pytest
from calibration_lines import make

from fa_a2a.bench import fitting, publication
from fa_a2a.errors import ProfileError
from fa_a2a.xstage.fit import fit
from fa_a2a.xstage.samples import read_runs

MACHINE = ("NVIDIA H200", 4, 132)


def line(seq_len, **fields):
    """Two waves of 29 key tiles of 160 at 4608 tokens, 58 us each; publication 3 and 6 us."""
    shape = {"batch": 1, "seq_len": seq_len, "num_heads": 24, "head_dim": 128, "dtype": "bfloat16"}
    alone = {4608: 116.0, 8192: 309.0}[seq_len]
    times = {"alone_us": [alone - 1, alone, alone + 1]}
    times |= {"inside_us": [x + 3 for x in times["alone_us"]], "boundary_us": [x + 6 for x in times["alone_us"]]}
    return {"kind": "publication", "device": MACHINE[0], "world_size": 4, **shape, **times, **fields}


def test_found():
    lines = [
        line(4608, inside_us=[200.0] * 3),
        line(4608),
        line(8192),
        line(4608, world_size=2, boundary_us=[900.0] * 3),
    ]
    own = publication.found(lines, *MACHINE)
    assert (own["publish_inside_us"], own["publish_us"]) == (3.0, 6.0)  # of the newest lines of this machine
    flops = 4 * 128 * 29 * 160 * 128 * 132 * 2
    assert publication.found([line(4608)], *MACHINE)["tflops"] == pytest.approx(flops / 116e6, abs=0.05)
    assert publication.found(lines, "NVIDIA B200", 4, 148) == {}


def test_the_profile_takes_what_was_measured():
    (run,) = read_runs(make())
    own = publication.found([line(4608), line(8192)], *MACHINE)
    profile = fitting.profile_of(fit(run), measured=own)
    assert (profile.publish_us, profile.publish_inside_us) == (6.0, 3.0)
    assert profile.attention.tflops == own["tflops"]
    assert profile.source == "fa-a2a calibrate"
    given = fitting.profile_of(fit(run), measured=own, base="h200x4")
    assert given.attention.tflops == 710.0 and "attention's speed from h200x4" in given.source


def test_lines_of_another_machine_are_left_out():
    lines = [*make(), line(4608, world_size=2), line(4608)]
    kept = fitting.like_the_last(lines)
    assert kept == [*make(), line(4608)]


@pytest.mark.parametrize("wrong", [{"inside_us": [1.0]}, {"boundary_us": None}, {"alone_us": [0.0] * 3}])
def test_a_malformed_line_is_an_error(wrong):
    with pytest.raises(ProfileError, match=r"one positive time a round.*calibrate again"):
        publication.found([line(4608, **wrong)], *MACHINE)
