"""Run under torchrun, one process for each GPU:

python -m torch.distributed.run --nproc-per-node 4 -m pytest tests/multigpu
"""

import os

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def world(need):
    """This rank's device, in a world that lasts for the session."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    need("multigpu", size > 1 and torch.cuda.device_count() >= size, "needs torchrun with two GPUs or more")
    from fa_a2a.bench.launch import join

    device = join(int(os.environ["RANK"]), size, "cuda")
    yield device
    torch.cuda.synchronize()
    dist.barrier()


@pytest.fixture
def device(world):
    """Every test starts and ends with no workspace, on all ranks together."""
    import fa_a2a

    dist.barrier()
    yield world
    fa_a2a.close()
