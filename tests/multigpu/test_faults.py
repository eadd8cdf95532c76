"""Faults that end the process's CUDA context: each runs in processes of its own, started here by rank 0."""

import subprocess
import sys
import textwrap

import torch.distributed as dist

_PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
from fa_a2a.bench.launch import join
from fa_a2a import UlyssesAttention
from fa_a2a.errors import FaA2AError

rank = int(os.environ["RANK"])
device = join(rank, 2, "cuda")
attention = UlyssesAttention(kernel="fa4", exchange="{exchange}", timeout_s=3)
parts = [torch.randn(1, 128, 4, 128, device=device, dtype=torch.bfloat16) for _ in range(3)]
attention(*parts)
torch.cuda.synchronize()
dist.barrier()
{fault}
"""

_REPORT = """
    begin = time.time()
    try:
        attention(*parts)
        torch.cuda.synchronize()
    except Exception as error:
        print("first:", type(error).__name__, flush=True)
    try:
        attention(*parts)
    except FaA2AError as error:
        print(f"after {time.time() - begin:.0f} s {type(error).__name__}: {error}", flush=True)
    os._exit(0)
"""


def run(fault, exchange="fused"):
    """Output of two ranks running the program; every rank of this session but rank 0 waits."""
    text = None
    if dist.get_rank() == 0:
        program = _PROGRAM.format(fault=textwrap.dedent(fault) + _REPORT, exchange=exchange)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
        command = [*command, "--master-port", "29731", sys.executable, "-c", program]
        text = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def test_a_rank_that_does_not_call_is_named_within_the_deadline(device):
    text = run("if rank == 1: time.sleep(12); os._exit(0)\nif rank == 0:")
    assert "PeerTimeoutError: rank 1 did not finish the exchange before attention of call 2" in text, text


def test_other_arguments_in_mid_run_end_the_call_everywhere(device):
    text = run(
        """
        if rank == 1:
            parts = [t[:, :64] for t in parts]
        if True:"""
    )
    assert text.count("PeerMismatchError") >= 2, text
