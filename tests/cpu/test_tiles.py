"""Which tile a launch takes, and the measured speeds by which `auto` compares kernels."""

import json
import math
from pathlib import Path

import pytest
from fa4_a2a.forward import alike_tiles
from fa4_a2a.persistent import PERSISTENT_TILES
from hypothesis import given
from hypothesis import strategies as st

from fa_a2a.native import build
from fa_a2a.xstage import AttentionShape, design
from fa_a2a.xstage.speeds import FORM, alone_us, shipped_speeds, table
from fa_a2a.xstage.tiles import FA3_TILES, FA4_TILES, Tile, attention_us, quickest

ROOT = Path(__file__).parents[2]
TABLES = {"fa3": FA3_TILES, "fa4": FA4_TILES}


@pytest.mark.parametrize(
    ("rows", "heads", "want"),
    [
        (4608, 6, 128),  # 144 tiles of 192 rows take two waves of 132, as do the 216 of 128
        (8192, 6, 192),  # 258 take two, 384 three
        (8192, 12, 192),
        (16384, 6, 192),
        (4608, 3, 128),  # one wave each
        (64, 1, 128),
        (2304, 12, 128),  # the chunks of two ranks with (4608, 6) each
    ],
)
@pytest.mark.parametrize("kernel", TABLES)
def test_the_tile_whose_waves_end_first(kernel, rows, heads, want):
    assert quickest(TABLES[kernel][64], rows=rows, heads=heads, num_sms=132).rows == want


@given(st.sampled_from([FA3_TILES[64], FA4_TILES[64]]), st.integers(1, 40000), st.integers(1, 64), st.integers(1, 200))
def test_no_tile_would_end_earlier(tiles, rows, heads, num_sms):
    def end(tile):
        return math.ceil(math.ceil(rows / tile.rows) * heads / num_sms) * tile.rows / tile.speed

    chosen = quickest(tiles, rows=rows, heads=heads, num_sms=num_sms)
    assert end(chosen) == min(map(end, tiles))


def test_tiles_of_a_head_dim_compute_the_same_bits():
    """Those with the same keys do. What is compiled ahead of time are these."""
    for tiles in (*FA3_TILES.values(), *FA4_TILES.values()):
        assert len({tile.keys for tile in tiles}) == 1
        assert tiles[0].speed == 1
    for head_dim, tiles in FA4_TILES.items():
        assert alike_tiles(head_dim, "sm_90a") == tuple((tile.rows, tile.keys) for tile in tiles)
        assert set(alike_tiles(head_dim, "sm_90a")) <= set(PERSISTENT_TILES[head_dim])
    for head_dim, tiles in FA3_TILES.items():
        assert build.variants(head_dim, "float16") == tuple(
            build.Variant(head_dim, "float16", (tile.rows, tile.keys)) for tile in tiles
        )


@pytest.mark.parametrize(("name", "tiles"), [("fa3", FA3_TILES), ("persistent", FA4_TILES), ("stock", FA4_TILES)])
def test_the_model_tiles_as_the_kernel_does(name, tiles):
    kernel = design(name)
    small = kernel.shape(batch=1, seq_len=4608, num_heads=24, head_dim=64, num_ranks=4)
    large = kernel.shape(batch=1, seq_len=8192, num_heads=24, head_dim=64, num_ranks=4)
    assert (small.tile_rows, large.tile_rows) == (128, 192)
    assert kernel.tile_speed(small) == tiles[64][1].speed < 1 == kernel.tile_speed(large)
    many = kernel.shape(batch=1, seq_len=4608, num_heads=24, head_dim=64, num_ranks=4, num_sms=144)
    assert many.tile_rows == 192  # one wave of 144


def test_attention_in_whole_waves():
    shape = AttentionShape(2, 4608, 24, 128, 4, key_tile=160)
    flops = 4 * 128 * 29 * 160 * 128 * 132  # a wave of 132 tiles, 29 steps of 160 keys
    assert attention_us(shape, tflops=700.0, num_sms=132) == pytest.approx(2 * 2 * flops / 700e6)
    assert attention_us(shape, tflops=700.0, num_sms=132, tile_speed=0.5) == pytest.approx(4 * 2 * flops / 700e6)


def line(kernel, seq_len, us, vs_fa4, head_dim=128, heads=6):
    return {
        **{"kind": "kernel", "device": "GPU", "kernel": kernel, "build": FORM, "batch": 1, "chunks": 4, "us": us},
        **{"seq_len": seq_len, "local_heads": heads, "head_dim": head_dim, "vs_fa4": vs_fa4},
        **{"date": f"2026-01-0{seq_len // 4096}T00:00:00Z", "content_hash": "x"},
    }


def test_table_from_lines(monkeypatch):
    """By the law fa3 has 0.99 of fa4's steps at 4608 keys: 32 of 144 and 29 of 160. The ratio is the paired one, not
    that of the medians."""
    monkeypatch.setattr("fa_a2a.xstage.speeds._CAPABILITIES", {"GPU": (9, 0)})
    lines = [line("fa4", 4608, 110.0, 1.0), line("fa3", 4608, 55.0, 1.02)]
    lines += [line("fa4", 8192, 290.0, 1.0), line("fa3", 8192, 290.0, 1.0)]
    lines += [line("fa3", 8192, 1.0, 9.0) | {"build": "default"}, line("fa3", 8192, 1.0, 9.0) | {"device": "other"}]
    found = {x["kernel"]: x for x in table(lines, "GPU", 132)["speeds"]}
    assert set(found) == {"fa3", "fa4"}
    rates = [4 * 256 * 128 * 132 * keys / us / 1e6 for keys, us in ((29 * 160, 110.0), (1.5 * 52 * 160, 290.0))]
    assert found["fa4"] == {"kernel": "fa4", "head_dim": 128, "tflops": round(sum(rates) / 2, 1), "scatter": 0.0}
    ratios = [1.02 * (32 * 144) / (29 * 160), 57 * 144 / (52 * 160)]
    middle = sum(ratios) / 2
    assert found["fa3"]["tflops"] == pytest.approx(sum(rates) / 2 * middle, abs=0.1)
    assert found["fa3"]["scatter"] == pytest.approx(ratios[0] / middle - 1, abs=1e-4)


def test_a_line_counts_with_the_tile_that_it_names(monkeypatch):
    """fa4's without one took its first tile: 144 of 192 rows in two waves, or 216 of 128 in as many shorter ones."""
    monkeypatch.setattr("fa_a2a.xstage.speeds._CAPABILITIES", {"GPU": (9, 0)})
    old = line("fa4", 4608, 100.0, 1.0, head_dim=64)
    flops = 4 * 36 * 128 * 64 * 132 * 2  # of two waves, by rows of a tile
    for told, rows, speed in ((old, 192, 1.0), (old | {"tile": "128x128"}, 128, FA4_TILES[64][1].speed)):
        (found,) = table([told], "GPU", 132)["speeds"]
        assert found["tflops"] == pytest.approx(rows * flops / speed / 100e6, abs=0.1)


def test_the_shipped_speeds_are_those_of_the_recorded_lines():
    lines = [json.loads(x) for x in (ROOT / "benchmarks/results/kernel_h200.jsonl").read_text().splitlines()]
    made = table(lines, "NVIDIA H200", 132)
    assert made == json.loads((ROOT / "fa_a2a/xstage/speeds/h200.json").read_text())
    assert set(shipped_speeds("nvidia h200")) == {(k, d) for k in ("fa3", "fa4") for d in (64, 128)}
    assert shipped_speeds("NVIDIA B200") == {}


@pytest.mark.parametrize("kernel", TABLES)
def test_speed_of_a_tile_is_the_recorded_ratio(kernel):
    """Of the law's time with the second tile to that with the first, at the shapes where both were measured."""
    lines = [json.loads(x) for x in (ROOT / "benchmarks/results/kernel_h200.jsonl").read_text().splitlines()]
    for head_dim, tiles in TABLES[kernel].items():
        for tile in tiles[1:]:
            found = recorded_speeds([x for x in lines if x["kernel"] == kernel], head_dim, tiles[0], tile)
            assert len(found) >= 4
            assert tile.speed == pytest.approx(sorted(found)[len(found) // 2], abs=0.02)


def recorded_speeds(lines, head_dim, first, other):
    """Rows in a given time of the other tile over those of the first, by shape."""
    us = {(built(x), x["seq_len"], x["local_heads"]): x["us"] for x in lines if x["head_dim"] == head_dim}
    found = []
    for _, seq_len, heads in [key for key in us if key[0] == (first.rows, first.keys)]:
        rates = [
            attention_us(AttentionShape(1, seq_len, heads, head_dim, 1, 2, t.rows, t.keys), tflops=1.0, num_sms=132)
            / us[(t.rows, t.keys), seq_len, heads]
            for t in (first, other)
        ]
        found.append(rates[1] / rates[0])
    return found


def built(line):
    """(rows, keys) of a build of one tile, staged in the case of fa3, or of the one that was chosen; None of others."""
    tile, _, output = line["build"].partition("/")
    if tile == "default":
        tile = line.get("tile", "")
    return tuple(map(int, tile.split("x"))) if output in ("", "staged") and "x" in tile else None


def test_a_slower_tile_takes_longer():
    shape = design("fa3").shape(batch=1, seq_len=4608, num_heads=24, head_dim=64, num_ranks=4)
    speed = shipped_speeds("NVIDIA H200")["fa3", 64]
    alone = alone_us(shape, design("fa3"), speed, 132)
    assert alone == pytest.approx(attention_us(shape, tflops=speed.tflops, num_sms=132) / FA3_TILES[64][1].speed)
    assert quickest((Tile(128, 128), Tile(128, 128, 2.0)), rows=1, heads=1, num_sms=1).speed == 2
