"""The ordering that the CPU path counts on: data stored, then its number; number read, then the data. Over real
processes, with a control that announces before it stores, which shows that the test can see a difference."""

import mmap
import os
import time

import pytest
import torch

from fa_a2a.comm.group import resolve
from fa_a2a.comm.shared_memory import SharedMemory, _memory_fence

ELEMENTS = 1 << 18
ROUNDS = 400


def pass_messages(rank, size, control):
    """Rank 0 writes a value everywhere into rank 1's block and announces it; rank 1 counts elements of the round
    before. The block's last page holds the number and the answer."""
    group = resolve(None)
    block = SharedMemory(group, 20.0).allocate(4 * ELEMENTS + mmap.PAGESIZE, 20.0)
    data = block.peers[1][: 4 * ELEMENTS].view(torch.int32)
    words = memoryview(block.handle[1])[4 * ELEMENTS :].cast("Q")
    source = torch.empty(ELEMENTS, dtype=torch.int32)
    stale, until = 0, time.monotonic() + 60
    for number in range(1, ROUNDS + 1):
        mine, other = (1, 0) if rank == 0 else (0, 1)
        while words[mine] != number - (rank == 0):
            assert time.monotonic() < until
            os.sched_yield()
        if rank == 0:
            source.fill_(number)
            if control:
                words[other] = number
                time.sleep(1e-4)  # or on one free core the reader would never run in between
            data.copy_(source)
            _memory_fence()
            words[other] = number
        else:
            _memory_fence()
            stale += int((data != number).any())
            _memory_fence()
            words[other] = number
    group.barrier("done", 20.0)
    return stale


@pytest.mark.parametrize("control", [False, True], ids=["release", "control"])
def test_what_is_stored_before_a_number_is_there_when_the_number_is(ranks, control):
    _, stale = ranks(2).run(pass_messages, control=control)
    if control:
        assert stale > 0, "a number that comes before its data is seen"
    else:
        assert stale == 0
