"""Faults that end the process's CUDA context: each runs in processes of its own, all of this file's side by side."""

import pytest
import two_ranks

_PROGRAM = """
import json, os, sys, time
import torch, torch.distributed as dist
from fa_a2a.bench.launch import join
from fa_a2a import UlyssesAttention

rank = int(os.environ["RANK"])
device = join(rank, 2, "cuda")
attention = UlyssesAttention(kernel="fa4", exchange="{exchange}", timeout_s=3)
parts = [torch.randn(1, 128, 4, 128, device=device, dtype=torch.bfloat16) for _ in range(3)]
attention(*parts)
torch.cuda.synchronize()
dist.barrier()
begin, errors = time.monotonic(), []
{fault}
for _ in range(2):  # on a GPU the call that fails ends the context, and the next one says why
    try:
        attention(*parts)
        torch.cuda.synchronize()
    except Exception as error:
        errors.append([type(error).__name__, str(error), time.monotonic() - begin])
        print(json.dumps(errors[-1]), file=sys.stderr, flush=True)
print(json.dumps({{"errors": errors}}), flush=True)
os._exit(0)
"""
SILENT = "if rank == 1: time.sleep(30)"
ARGUMENTS = "if rank == 1: parts = [t[:, :64] for t in parts]"
EXCHANGE = """
other = UlyssesAttention(kernel="fa4", exchange="fused", timeout_s=3)
other(*parts)
if rank == 1: attention = other
"""
FAULTS = [(SILENT, "fused"), (SILENT, "overlapped"), (ARGUMENTS, "fused"), (ARGUMENTS, "overlapped")]
FAULTS += [(EXCHANGE, "overlapped")]
LIMIT_S = 45.0


@pytest.fixture(scope="module")
def found(kernels_are_cached):
    """(fault, exchange) -> what each rank reported and its errors."""
    programs = {(x, y): (["-c", _PROGRAM.format(fault=x, exchange=y)], None) for x, y in FAULTS}
    return two_ranks.from_rank_0(lambda: two_ranks.run(programs, LIMIT_S))


def first(report, kind):
    """The first error of that kind that a rank had: (text, seconds)."""
    return next(((text, seconds) for name, text, seconds in (report or {"errors": []})["errors"] if name == kind), None)


@pytest.mark.parametrize("exchange", ["fused", "overlapped"])
def test_a_rank_that_does_not_call_is_named_within_the_deadline(found, exchange):
    ranks = found[SILENT, exchange]
    error = first(ranks[0][0], "PeerTimeoutError")
    assert error is not None, two_ranks.lines(ranks)
    assert "rank 1 did not finish the exchange before attention of call 2" in error[0], two_ranks.lines(ranks)
    assert error[1] < 9, "the deadline is 3 s"


@pytest.mark.parametrize(("what", "exchange"), FAULTS[2:], ids=["arguments-fused", "arguments-overlapped", "exchange"])
def test_another_call_in_mid_run_ends_the_call_everywhere(found, what, exchange):
    ranks = found[what, exchange]
    for report, _ in ranks:
        assert first(report, "PeerMismatchError") is not None, two_ranks.lines(ranks)
