"""A rank killed or stopped at each stage of a call, a rank that raises, and worlds that are set up in other ways.

Faults end the process's CUDA context, so each runs in processes of its own (two_ranks.py), those of one kind side by
side: three rounds of 10 to 20 s, of which LIMIT_S is the most.
"""

import pytest
import torch
import two_ranks
from stage_program import DEADLINE_S, GOOD_CALLS

LIMIT_S = 45.0  # for one round; below a limit of 60 s a test, with a slow start of all processes
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
    "one visible GPU": lambda rank: {
        "CUDA_VISIBLE_DEVICES": str(rank % torch.cuda.device_count()),
        "LOCAL_RANK": "0",
    },
}


def program(situation, signal="SIGKILL"):
    return [str(two_ranks.HERE / "stage_program.py"), situation, signal]


def run(programs):
    return two_ranks.from_rank_0(lambda: two_ranks.run(programs, LIMIT_S))


@pytest.fixture(scope="module")
def killed(kernels_are_cached):
    return run({stage: (program(stage), None) for stage in STAGES})


@pytest.fixture(scope="module")
def stopped(kernels_are_cached):
    return run({stage: (program(stage, "SIGSTOP"), None) for stage in STAGES})


@pytest.fixture(scope="module")
def others(kernels_are_cached):
    """Behind the tests that lose ranks: on the machine that this leaves."""
    return run(
        {**{name: (program(name), environ) for name, environ in SETTINGS.items()}, "raises": (program("raises"), None)}
    )


def check_survivor(found, when, number):
    (survivor, _), _ = found
    told = two_ranks.lines(found)
    assert survivor is not None, f"rank 0 reported nothing\n{told}"
    assert survivor["error"] == "PeerTimeoutError", told
    assert f"rank 1 did not finish the exchange {when} attention of call {number}" in survivor["text"], told
    assert survivor["good"] == number - GOOD_CALLS - 1, told
    assert survivor["seconds"] < DEADLINE_S + SLACK_S, told


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_is_named(killed, stage):
    check_survivor(killed[stage], *STAGES[stage][0])


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_rank_is_named(stopped, stage):
    check_survivor(stopped[stage], *STAGES[stage][1])


def test_a_rank_that_raises_in_mid_call_ends_the_others_at_once(others):
    (survivor, _), (victim, _) = others["raises"]
    told = two_ranks.lines(others["raises"])
    assert survivor is not None, told
    assert victim is not None, told
    assert victim["text"] == "no such instruction", told
    assert survivor["error"] == "PeerFailedError", told
    assert "rank 1 failed in call" in survivor["text"], told
    assert survivor["seconds"] < 10, f"the deadline was 60 s away\n{told}"


@pytest.mark.parametrize("name", ["nobody", "nvshmem before"])
def test_fresh_processes_work_at_once(others, name):
    for found, _ in others[name]:
        assert found is not None, two_ranks.lines(others[name])
        assert (found["good"], found["text"]) == (GOOD_CALLS, "fa4 fused")


def test_one_visible_gpu_for_each_process(others):
    """NVSHMEM reaches only GPUs that the process sees; either it works, or the error is one and says so."""
    for found, errors in others["one visible GPU"]:
        told = two_ranks.lines(others["one visible GPU"])
        if found is not None:
            assert (found["good"], found["text"]) == (GOOD_CALLS, "fa4 fused"), told
        else:
            assert "UnsupportedError" in errors, told
            assert "exchange='collective'" in errors, told
