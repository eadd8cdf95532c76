"""Kernel 'fa4': which of its compiled tiles a launch takes at head_dim 64. A GPU's figures are given, nothing runs."""

from types import SimpleNamespace

import pytest
import torch
from fa4_a2a.forward import load_forward

from fa_a2a.bench.alone import candidates
from fa_a2a.comm.symmetric import Release
from fa_a2a.layout import ExchangeShape
from fa_a2a.ops import kernels
from fa_a2a.ops.fa4 import _FA4
from fa_a2a.ops.fused import local_sink
from fa_a2a.ops.kernels import Sink
from fa_a2a.ops.pace import slice_pace_ns
from fa_a2a.xstage.tiles import FA4_TILES

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SMALL, LARGE = FA4_TILES[64][::-1]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    figures = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: figures)


def launches(kernel, batch, seq, heads, dim, ranks, release, with_lse=False, sink=None):
    q, k, v = (torch.empty(batch, seq, n, dim, dtype=BF16) for n in (heads, *(2 * [heads // kernel.heads_per_kv])))
    sink = sink or local_sink(ExchangeShape(batch, seq, heads * ranks, dim, ranks, 2), BF16, CPU)
    return kernel.launches(q, k, v, 0.1, sink, with_lse, release)


def tiles(kernel, made):
    """Of launches, by the kernel that each calls."""
    return [next(t for t, b in kernel._built.items() if x.func in (b.forward, b.persistent)) for x in made]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("release", [None, Release.none(CPU)], ids=["stock", "persistent"])
def test_launches_take_the_tile_whose_waves_end_first(release, with_lse):
    kernel = _FA4(CPU, BF16, 64, with_lse, fused=True)
    for seq, batch, want in ((4608, 1, SMALL), (4608, 2, SMALL), (8192, 1, LARGE)):
        made = launches(kernel, batch, seq, 6, 64, 4, release, with_lse)
        assert tiles(kernel, made) == batch * [want], "one launch for each batch entry"
        if release is not None:
            assert {x.func.tile for x in made} == {(want.rows, want.keys)}
            assert {x.args[6] for x in made} == {slice_pace_ns(want.rows, seq, 64, 2, 132, 16)}


def test_launches_of_one_call_may_take_different_tiles():
    """Chunks at unequal distances, of 2048 rows and 4 heads: three together are one wave of 132 large tiles, one alone
    is less than a wave of either."""
    kernel = _FA4(CPU, BF16, 64, False, fused=True)
    room, lse = torch.empty(9, 1, 2048, 4, 64, dtype=BF16), torch.empty(9, 1, 4, 2048)
    sink = Sink(*(tuple(t[place] for place in (0, 1, 2, 8)) for t in (room, lse)))
    made = launches(kernel, 1, 4 * 2048, 4, 64, 4, Release.none(CPU), sink=sink)
    assert tiles(kernel, made) == [LARGE, SMALL]


def test_grouped_heads_count_by_queries_and_causal_keeps_the_first_tile():
    grouped = _FA4(CPU, BF16, 64, False, fused=True, heads_per_kv=3)
    assert tiles(grouped, launches(grouped, 1, 4608, 6, 64, 4, Release.none(CPU))) == [SMALL]
    causal = _FA4(CPU, BF16, 64, False, causal=True)
    assert set(causal._built) == {SMALL, LARGE} and not causal.can_release
    assert causal._causal is load_forward(64, "bfloat16", "sm_90a", 132, LARGE[:2], causal=True), "one load a file"


def test_a_named_tile_is_the_only_one():
    for tile in FA4_TILES[64]:
        alone = _FA4(CPU, BF16, 64, False, tile=(tile.rows, tile.keys))
        for seq in (4608, 8192):
            (took,) = tiles(alone, launches(alone, 1, seq, 6, 64, 4, None))
            assert took[:2] == tile[:2] and alone.tile(seq, 6) is took


@pytest.mark.parametrize(
    ("dim", "batch", "seq", "others"),
    [
        (64, 1, 4608, ["192x128"]),
        (64, 1, 8192, ["128x128"]),
        (64, 2, 2304, ["192x128"]),  # as many tiles as the first
        (64, 2, 4608, ["128x128"]),  # 288 large ones fill 3 waves, 432 small ones 4
        (128, 1, 4608, ["128x176"]),
        (128, 2, 8192, ["128x176"]),
    ],
)
def test_attention_alone_is_timed_once_with_each_tile(dim, batch, seq, others):
    """With the tile that a launch takes, and with the others: the best of two series of one tile would be too low."""
    q = torch.empty(batch, seq, 6, dim, dtype=BF16)
    found = candidates("alone", _FA4(CPU, BF16, dim, False), q.shape)
    assert list(found) == ["alone", *(f"alone_{tile}" for tile in others)]
    taken = [next(t for t, b in kernel._built.items() if b is kernel._for(q))[:2] for kernel in found.values()]
    assert [f"{rows}x{keys}" for rows, keys in taken[1:]] == others and len(set(taken)) == len(taken)


def test_a_kernel_without_tiles_to_compare_with_is_timed_alone():
    kernel = kernels.load("cpu", CPU, BF16, 64, False, False)
    assert candidates("alone", kernel, (1, 4608, 6, 64)) == {"alone": kernel}


def test_head_dim_128_has_one_tile():
    kernel = _FA4(CPU, BF16, 128, False, fused=True)
    assert [t[:2] for t in kernel._built] == [(128, 160)]
    (made,) = launches(kernel, 1, 4608, 6, 128, 4, Release.none(CPU))
    assert made.func is kernel._only.persistent and made.args[6] == slice_pace_ns(128, 4608, 128, 2, 132, 16)
