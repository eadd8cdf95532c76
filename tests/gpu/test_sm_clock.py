"""The SMs' clock, read on the device, beside a kernel that takes a known number of cycles."""

import pytest
import torch

from fa_a2a.bench.clock import Clock

CYCLES = 20_000_000


def test_cycles_of_a_kernel_that_counts_them(device):
    clock = Clock(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    for _ in range(2):  # the tables are used again
        clock.start()
        first.record()
        torch.cuda._sleep(CYCLES)
        last.record()
        clock.stop()
        mhz = clock.mhz()
        assert 100 < mhz < 3000
        assert first.elapsed_time(last) * 1e3 * mhz == pytest.approx(CYCLES, rel=0.02)
