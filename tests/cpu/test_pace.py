import argparse

import pytest
import torch
from fa4_a2a.persistent import STAMP_WORDS, Build, Order, Stamp

from fa_a2a.bench import pace_options, stalls
from fa_a2a.errors import ConfigurationError
from fa_a2a.ops.pace import PROFILES, slice_pace_ns
from fa_a2a.xstage import load_profile


def test_variants_are_builds():
    assert pace_options.build_of("warp") == Build()
    assert pace_options.build_of("step/232:40/rows8") == Build("step", slice_rows=8, registers=(232, 40))
    assert pace_options.build_of("tile/clock") == Build(barriers="tile", pace="clock")
    for wrong in ("warps", "rows", "rowsN", "1:2:3", ""):
        with pytest.raises(ConfigurationError, match="variant"):
            pace_options.build_of(wrong)


def test_configurations_are_every_combination():
    parser = argparse.ArgumentParser()
    pace_options.add(parser)
    options = parser.parse_args(["--variants", "warp", "step", "--orders", "last", "--paces", "0", "3000"])
    chosen = pace_options.configs(options.variants, options.orders, options.paces)
    assert [c.name for c in chosen] == ["warp last 0", "warp last 3000", "step last 0", "step last 3000"]
    with pytest.raises(ConfigurationError, match="by_head"):
        pace_options.configs(["warp"], ["middle"], [0])


def test_orders_are_the_kernels():
    assert [order.name.lower() for order in Order] == ["own_first", "own_last", "own_last_by_head"]
    assert pace_options.ORDERS == ("first", "last", "by_head")


def test_stalls_by_place_in_the_ctas_sequence():
    """Two CTAs of two tiles each, recorded by tile number and not in the order in which they ran."""
    stamps = torch.zeros(4, STAMP_WORDS, dtype=torch.int64)
    for tile, (cta, start, wait) in enumerate([(0, 90_000, 2000), (1, 10_000, 0), (0, 20_000, 500), (1, 80_000, 1000)]):
        for group in range(2):
            stamps[tile, Stamp.WANTED + group] = start + group
            stamps[tile, Stamp.GOT + group] = start + group + wait * group
        stamps[tile, Stamp.CTA] = cta
        stamps[tile, Stamp.FULL], stamps[tile, Stamp.LAST] = start + 5000, start + 9000
        stamps[tile, Stamp.READ] = start + 9000 + wait
    first, second = stalls.summary(stamps.flatten())
    assert (first["tiles"], first["wait_median_us"], first["wait_max_us"]) == (2, 0.25, 0.5)
    assert (second["wait_median_us"], second["wait_max_us"], second["read_max_us"]) == (1.5, 2.0, 2.0)
    assert first["issue_median_us"] == 4.0
    assert "#1 1.5" in stalls.text([first, second])


@pytest.mark.parametrize(("arch", "tile_rows", "num_sms"), [("sm_90a", 128, 132), ("sm_100a", 256, 148)])
def test_pace_keeps_below_the_path_and_within_the_next_tile(arch, tile_rows, num_sms):
    profile = load_profile(PROFILES[arch])
    assert num_sms == profile.num_sms
    slices = tile_rows // 16
    for keys in (1024, 4608, 65536):
        tile_ns = slices * slice_pace_ns(tile_rows, keys, 128, 2, num_sms, 16, arch)
        rate_gb_s = num_sms * tile_rows * 128 * 2 / tile_ns
        compute_us = profile.attention.key_tile_us(tile_rows=tile_rows, key_tile=keys, head_dim=128, num_sms=num_sms)
        assert tile_ns <= 500 * compute_us
        if keys > 2048:
            assert rate_gb_s == pytest.approx(profile.rate_gb_s / 2, rel=1e-2)
