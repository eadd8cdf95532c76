"""Run under torchrun, one process for each GPU, the whole tier in one go:

python -m torch.distributed.run --nproc-per-node 2 -m pytest -q --timeout 60 tests/multigpu

What fails is printed at once, by each rank: a run that is ended from outside prints no summary. Tests of faults
(test_stages_on_gpus, test_faults) start ten processes at a time beside the session's own and take about a minute; the
tests that are skipped with two GPUs need four. A limit for a test must leave room for one round of those processes,
50 s. Kernels that are not in the cache (FA_A2A_CACHE_DIR) are compiled by the first test that needs them.

With FA_A2A_SHARE_GPU=1 the ranks may be more than the GPUs: the driver lets their kernels take turns, milliseconds
each, so a limit for a test must be larger (--timeout 240), and what measures times is skipped. Stores then stay inside
one GPU: everything is tried but the links.
"""

import os

import pytest
import torch
import torch.distributed as dist

from fa_a2a import config


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        writer = item.config.get_terminal_writer()
        writer.line()
        writer.sep("-", f"rank {os.environ.get('RANK', '0')}: {report.nodeid}, {report.when}")
        writer.line(report.longreprtext[-6000:])
        writer.flush()
    return report


@pytest.fixture(scope="session")
def world(need):
    """This rank's device, in a world that lasts for the session."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    enough = torch.cuda.device_count() >= (1 if config.share_gpu() else size)
    need("multigpu", size > 1 and enough, "needs torchrun with two GPUs or more")
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


@pytest.fixture(scope="session")
def kernels_are_cached(world, need):
    """Processes that a test starts find the kernels they use compiled: head_dim 128, bfloat16."""
    need("multigpu", torch.cuda.get_device_capability(world) == (9, 0), "needs GPUs of compute capability 9.0")
    import fa_a2a

    size = dist.get_world_size()
    parts = [torch.zeros(1, 128, 2 * size, 128, device=world, dtype=torch.bfloat16) for _ in range(3)]
    for exchange in ("fused", "overlapped", "collective"):
        fa_a2a.UlyssesAttention(kernel="fa4", exchange=exchange)(*parts)
    torch.cuda.synchronize()
    fa_a2a.close()
