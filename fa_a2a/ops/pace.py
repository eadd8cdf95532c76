"""How fast a finished tile may leave: below the rate of the path, and before the next tile needs its place."""

from __future__ import annotations

from functools import lru_cache

from ..xstage import load_profile
from ..xstage.burst_gap import drain_us

# The shipped profile whose rates are taken, by the kernel's architecture. That of sm_100a is the paper's 148-SM GPU; no
# kernel of ours has run on one.
PROFILES = {"sm_90a": "h200x4", "sm_100a": "paper"}
HEADROOM = 2.0  # a full wave leaves in this multiple of the time in which the path could drain it


@lru_cache(maxsize=256)
def slice_pace_ns(
    tile_rows: int, keys: int, head_dim: int, itemsize: int, num_sms: int, slice_rows: int, arch: str = "sm_90a"
) -> int:
    """Pause between two slices of a tile, in ns. tile_rows: what a CTA finishes together.

    All SMs together then store at R / HEADROOM, so that no store waits in the path and no load behind a store. At most
    half of the next tile's time is spent: a short sequence rather queues a little than holds the next epilogue up.
    """
    profile = load_profile(PROFILES[arch])
    wave_us = drain_us(volume_bytes=num_sms * tile_rows * head_dim * itemsize, rate_gb_s=profile.rate_gb_s)
    tile_us = profile.attention.key_tile_us(tile_rows=tile_rows, key_tile=keys, head_dim=head_dim, num_sms=num_sms)
    slices = -(-tile_rows // slice_rows)
    return int(1e3 * min(HEADROOM * wave_us, tile_us / 2) / slices)
