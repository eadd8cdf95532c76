"""`fa-a2a audit`: is the exchange hidden, by which profile; each design in words, its terms, a simulated launch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa_a2a.cli import main
from fa_a2a.xstage import DESIGNS
from fa_a2a.xstage.speeds import shipped_speeds

RECORDED = Path(__file__).parents[2] / "benchmarks/results/kernel_h200.jsonl"
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
    assert "cost: sender-visible 0.0 us, ready 4.4 us (publication inside: 4.4)" in capsys.readouterr().out
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
        (("--ranks", "9"), "at most 8 ranks; got --ranks 9; name a profile for so many with --profile"),
        (("--ranks", "1"), "one rank has nothing to exchange: --ranks must be at least 2, got 1"),
        (("--gpu", "NVIDIA B200"), "profiles are shipped for 148-SM NVIDIA GPU of arXiv:2607.23264, NVIDIA H200"),
        (("--gpu", "NVIDIA B200", "--profile", "h200x4"), "is for 'NVIDIA H200'"),
        (("--heads", "3"), "as many heads as ranks, got 3 heads over 4 ranks"),
        (("--heads", "0"), "num_heads must be at least 1"),
        (("--seq-len", "3"), "as many tokens as ranks, got 3 tokens over 4 ranks"),
        (("--tile-rows", "0"), "tile_rows must be at least 1"),
        (("--seq-len", str(10**9)), "goes through the tiles one by one, at most 2000000; got 1.88e+08 of 128 rows"),
        (("--heads", str(10**12)), "goes through the tiles one by one"),
        (("--seq-len", "1000000", "--tile-rows", "1"), "of 1 rows"),
    ],
)
def test_refusals(capsys, options, message):
    assert main([*SHAPE, "--kernel", "persistent", *options]) == 1
    assert message in capsys.readouterr().err


# tokens, heads: Flux 1024 and 2048 px with 512 of text, Qwen-Image 1328 px, Wan 1.3B and 14B at 480p, 14B at 720p, all
# of 81 frames, HunyuanVideo 720p of 129 frames. (ranks, after attention, before attention)
HIDDEN, FRONT, OVERLAPPED = "HIDDEN", "comes in front of it: overlapping it is for", "takes it overlapped"
SHAPES = [
    (4608, 24, 2, HIDDEN, OVERLAPPED),
    (4608, 24, 4, "HIDDEN BY 81 %", OVERLAPPED),
    (4608, 24, 8, "NOT HIDDEN", OVERLAPPED),
    (16896, 24, 2, HIDDEN, OVERLAPPED),
    (16896, 24, 8, HIDDEN, OVERLAPPED),
    (7401, 24, 4, HIDDEN, FRONT),
    (32760, 12, 8, HIDDEN, FRONT),
    (32760, 40, 4, HIDDEN, OVERLAPPED),
    (75600, 40, 8, HIDDEN, OVERLAPPED),
    (119056, 24, 8, HIDDEN, OVERLAPPED),
    (1024, 24, 8, "NOT HIDDEN", "takes it in front"),
]


def ask(capsys, *options):
    assert main(["audit", *map(str, options)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("tokens", "heads", "ranks", "after", "before"), SHAPES)
def test_shapes_of_users(capsys, tokens, heads, ranks, after, before):
    out = ask(capsys, "--seq-len", tokens, "--heads", heads, "--ranks", ranks, "--kernel", "persistent")
    assert f"persistent: the exchange after attention is {after}: " in out
    assert before in out
    assert "-0 us" not in out and "1 waves" not in out
    shown, share, ready, attention, volume, behind = map(
        float,
        re.search(
            r"after attention is .*?: ([\d.]+) us \(([\d.]+) %\) show at the kernel's end, ([\d.]+) us .* beside about "
            r"(\d+) us of attention; behind it, its ([\d.]+) MB would take (\d+) us",
            out,
        ).groups(),
    )
    assert shown < ready and share == pytest.approx(100 * shown / attention, abs=1.0)
    rows, mine = -(-tokens // ranks), -(-heads // ranks)
    waves = -(-ranks * -(-rows // 128) * mine // 132)
    tflops, rate_gb_s = (716.5, 366.0) if ranks == 2 else (710.0, 354.0)
    flops = waves * 132 * 4 * 128 * 128 * -(-tokens // 160) * 160
    assert attention == pytest.approx(flops / tflops / 1e6, abs=0.6)
    exact_mb = (ranks - 1) * rows * mine * 256 / 1e6  # tiles round it up
    assert exact_mb - 0.1 <= volume <= exact_mb * (1 + 128 / rows) + 0.1
    assert behind == pytest.approx(volume * 1e3 / rate_gb_s, abs=0.8)


def test_attention_of_head_dim_64_takes_what_was_measured(capsys):
    """One H200 of four, by `fa-a2a kernel`; the rate is a median of the lines of both fused forms, the stock kernel's
    are in none. With 710 TFLOP/s, which head_dim 128 has, it would be a fifth less."""
    designs = {("fa4", "default"): "stock", ("fa4", "fused"): "persistent", ("fa3", "fused"): "fa3"}
    seen = {}
    for line in map(json.loads, RECORDED.read_text().splitlines()):
        kernel, seq_len, heads = line["kernel"], line["seq_len"], line["local_heads"]
        if line["head_dim"] != 64 or (kernel, line["build"]) not in designs:
            continue
        name = designs[kernel, line["build"]]
        out = ask(capsys, "--seq-len", seq_len, "--heads", 4 * heads, "--head-dim", 64, "--ranks", 4, "--kernel", name)
        found = float(re.search(r"beside about (\d+) us of attention", out)[1])
        known_to = 0.03 + shipped_speeds(line["device"])[kernel, 64].scatter
        assert found == pytest.approx(line["us"], rel=known_to), (name, seq_len, heads)
        assert f" TFLOP/s, measured of {kernel} at head_dim 64" in out and "TAKEN" not in out
        seen[name, seq_len, heads] = line["us"], found
    assert len(seen) == 12


def test_whose_rate_of_attention_it_is(capsys):
    own = "attention at 710.0 TFLOP/s, the profile's at head_dim 128"
    out = ask(capsys, *SHAPE[1:])
    assert out.count(f"{own}\n") == 2 and "TFLOP/s, measured" not in out, "the kernel's, and the bounds'"
    rate = shipped_speeds("NVIDIA H200")["fa4", 64].tflops
    for_64, small = (
        f"attention at {rate} TFLOP/s, measured of fa4 at head_dim 64",
        "; of it tiles of 128x128 reach 0.844",
    )
    assert ask(capsys, *SHAPE[1:], "--head-dim", 64).count(f"{for_64}{small}\n") == 2
    assert f"{for_64}\n" in ask(capsys, "--seq-len", 8192, "--heads", 24, "--head-dim", 64, "--kernel", "stock")
    assert f"{own}, TAKEN FOR 96, for which none of fa4 is known on NVIDIA H200\n" in ask(
        capsys, *SHAPE[1:], "--head-dim", 96
    )
    paper = ask(capsys, *SHAPE[1:], "--head-dim", 64, "--profile", "paper")
    assert (
        "attention at 0.79 us for 128 rows and 128 keys of head_dim 128, the profile's at head_dim 128, TAKEN" in paper
    )


def test_bounds_at_head_dim_64_are_of_the_tile_that_the_stock_kernel_has(capsys):
    """36 steps of 4 * 128**2 * 64 flops on each of 132 SMs, at 0.844 of the rate."""
    gap_us = 36 * 4 * 128**2 * 64 * 132 / (0.844 * 1e6 * shipped_speeds("NVIDIA H200")["fa4", 64].tflops)
    assert f"the Q-loop gives {gap_us:.1f} us" in ask(capsys, *SHAPE[1:], "--head-dim", 64, "--own-chunk", "first")


def test_without_a_profile_for_so_many_ranks_it_says_what_it_takes_and_assumes(capsys):
    first, *rest = ask(capsys, *SHAPE[1:], "--ranks", "8").splitlines()
    assert first.startswith("profile h200x4: NVIDIA H200, 4 ranks, 2026-11-29, TAKEN FOR 8 ranks, for which none is")
    assert "drain as fast as with 4 ranks (measured: 366 GB/s with 2, 354 GB/s with 4)" in first
    text = "\n".join(rest)
    assert "were the path half as fast, 177 GB/s, 19.4 us would show." in text and "h200x4 for 8: 4608 tokens" in text
    for ranks in (3, 5, 6, 7):
        out = ask(capsys, "--seq-len", 8190, "--heads", 210, "--ranks", ranks)
        assert out.startswith(f"profile h200x4: NVIDIA H200, 4 ranks, 2026-11-29, TAKEN FOR {ranks} ranks")
    exact = ask(capsys, *SHAPE[1:], "--ranks", "2")
    assert exact.startswith("profile h200x2: NVIDIA H200, 2 ranks, 2026-11-30.\n")
    assert "TAKEN" not in exact and "half as fast" not in exact
    assert ask(capsys, *SHAPE[1:]).startswith("profile h200x4: NVIDIA H200, 4 ranks, 2026-11-29; 4 ranks for lack of")
    assert ask(capsys, *SHAPE[1:], "--gpu", "nvidia h200", "--ranks", "8").startswith("profile h200x4")


def test_shards_that_do_not_divide_are_said_and_the_largest_counts(capsys):
    out = ask(capsys, "--seq-len", 7401, "--heads", 30, "--ranks", 4)
    assert "30 heads over 4 ranks: 8 or 7 each; predicted for 8, the slowest." in out
    assert "7401 tokens over 4 ranks: shards of 1851 or 1850; predicted for 1851." in out
    assert "7401 tokens, 32 heads of 128" in out


def test_without_a_kernel_the_librarys_comes_first_then_the_bounds(capsys):
    out = ask(capsys, *SHAPE[1:])
    assert out.index("persistent: the exchange after attention") < out.index("For comparison") < out.index("rate bound")
    plain = ask(capsys, *SHAPE[1:], "--head-dim", 96)
    assert (
        "persistent:" not in plain
        and "No kernel here paces its stores at head_dim 96" in plain
        and "rate bound holds" in plain
    )
    assert "persistent:" not in ask(capsys, *SHAPE[1:], "--own-chunk", "last")
    paper = ask(capsys, *SHAPE[1:], "--profile", "paper")
    assert "the exchange before" not in paper and "until every tile" not in paper


def test_the_cost_of_a_batch_is_of_all_its_launches(capsys):
    one, three = (ask(capsys, *SHAPE[1:], "--batch", batch, "--kernel", "persistent") for batch in (1, 3))
    assert "beside about 113 us" in one and "beside about 339 us" in three
    assert "2.8 us (2.5 %) show" in one and "8.3 us (2.5 %) show" in three
    assert "comes in front of it: overlapping it is for batch 1" in three


def test_no_torch_but_for_the_exchange_before_attention():
    code = "import sys; from fa_a2a.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    for options, want in ((("--kernel", "stock"), "False"), (("--kernel", "persistent"), "True")):
        done = subprocess.run(
            [sys.executable, "-c", code, *SHAPE, *options], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == want
