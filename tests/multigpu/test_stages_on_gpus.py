"""A rank killed or stopped at each stage of a call, a rank that raises, and worlds that are set up in other ways.

Faults end the process's CUDA context, so each runs in processes of its own, those of one signal side by side.
"""

import pytest
import torch
import torch.distributed as dist
import two_ranks
from stage_program import DEADLINE_S, GOOD_CALLS

SLACK_S = 6.0
# which step the survivor misses in which call, when rank 1 is killed and when it is stopped: a stopped process's GPU
# goes on with what was enqueued
STAGES = {
    "before the exchange": (("before", 4), ("before", 4)),
    "in the exchange": (("before", 4), ("before", 5)),
    "in attention": (("after", 4), ("after", 4)),
    "before the release": (("after", 4), ("after", 4)),
    "in the wait": (("before", 5), ("before", 5)),
}
SETTINGS = {
    "nobody": None,
    "nvshmem before": None,
    "one visible GPU": lambda rank: {"CUDA_VISIBLE_DEVICES": str(rank), "LOCAL_RANK": "0"},
}


def from_rank_0(make):
    """make() on rank 0 of this session, known to all; the others wait."""
    box = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))  # waits without a kernel on the GPU
    return box[0]


@pytest.fixture(scope="module")
def killed(world):
    return from_rank_0(lambda: two_ranks.run({stage: ([stage, "SIGKILL"], None) for stage in STAGES}, 60))


@pytest.fixture(scope="module")
def stopped(world):
    return from_rank_0(lambda: two_ranks.run({stage: ([stage, "SIGSTOP"], None) for stage in STAGES}, 60))


@pytest.fixture(scope="module")
def others(killed, stopped):
    """After the ranks were lost: on the machine that this leaves."""
    programs = {name: ([name, "SIGKILL"], environ) for name, environ in SETTINGS.items()}
    return from_rank_0(lambda: two_ranks.run({**programs, "raises": (["raises", "SIGKILL"], None)}, 60))


def check_survivor(found, when, number):
    (survivor, errors), _ = found
    assert survivor is not None, errors
    assert survivor["good"] == number - GOOD_CALLS - 1, survivor
    assert survivor["error"] == "PeerTimeoutError"
    assert f"rank 1 did not finish the exchange {when} attention of call {number}" in survivor["text"], survivor
    assert survivor["seconds"] < DEADLINE_S + SLACK_S


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_is_named(device, killed, stage):
    check_survivor(killed[stage], *STAGES[stage][0])


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_rank_is_named(device, stopped, stage):
    check_survivor(stopped[stage], *STAGES[stage][1])


def test_a_rank_that_raises_in_mid_call_ends_the_others_at_once(device, others):
    (survivor, errors), (victim, _) = others["raises"]
    assert victim["text"] == "no such instruction"
    assert survivor is not None, errors
    assert survivor["error"] == "PeerFailedError", survivor
    assert "rank 1 failed in call" in survivor["text"]
    assert survivor["seconds"] < 10, "the deadline was 60 s away"


@pytest.mark.parametrize("name", ["nobody", "nvshmem before"])
def test_fresh_processes_work_at_once(device, others, name):
    for found, errors in others[name]:
        assert found is not None, errors
        assert (found["good"], found["text"]) == (GOOD_CALLS, "fa4 fused")


def test_one_visible_gpu_for_each_process(device, others):
    """NVSHMEM reaches only GPUs that the process sees; either it works, or the error is one and says so."""
    for found, errors in others["one visible GPU"]:
        if found is not None:
            assert (found["good"], found["text"]) == (GOOD_CALLS, "fa4 fused")
        else:
            assert "UnsupportedError" in errors, errors
            assert "exchange='collective'" in errors, errors
