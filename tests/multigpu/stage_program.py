"""One rank of two that lose each other: run by two_ranks.py as `stage_program.py SITUATION SIGNAL`, rank 1 the victim.

Prints one line of JSON: the good calls, then the error of the first bad one and how long it took to be raised.
"""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from fa_a2a import UlyssesAttention, attention_gather, scatter_heads
from fa_a2a.bench.launch import join
from fa_a2a.comm.group import resolve

DEADLINE_S = 4.0
GOOD_CALLS = 3
FUSED = {"kernel": "fa4", "exchange": "fused"}


def busy(seconds):
    """The device's own delay, enqueued like a kernel: cycles, at 1.5 to 2 GHz."""
    torch.cuda._sleep(int(seconds * 1.7e9))


def end(signal_number):
    os.kill(os.getpid(), signal_number)


def be_victim(situation, number, attention, parts):
    memory = resolve(None).workspace.memory
    if situation == "in the exchange":  # its kernel is enqueued, and has not begun
        busy(1.0)
        attention(*parts)
    elif situation == "in attention":  # q, k, v are out
        scatter_heads(*parts, **FUSED)
        busy(1.0)
        time.sleep(0.3)
    elif situation == "before the release":  # every tile is stored
        real = memory.release
        memory.release = lambda *args, **kwargs: real(*args, **{**kwargs, "silent": True})
        attention_gather(scatter_heads(*parts, **FUSED, timeout_s=DEADLINE_S + 1))
        torch.cuda.synchronize()
    elif situation == "in the wait":
        attention(*parts)
        time.sleep(0.5)
    elif situation == "raises":
        workspace = resolve(None).workspace
        shards = scatter_heads(*parts, **FUSED, timeout_s=60)

        def broken():
            raise RuntimeError("no such instruction")

        from fa_a2a.ops import fused

        workspace.prepare(fused.Prepared, shards._plan)._calls = {60.0: broken}
        try:
            attention_gather(shards, timeout_s=60)
        except RuntimeError as error:
            torch.cuda.synchronize()
            print(json.dumps({"good": 0, "error": type(error).__name__, "text": str(error)}), flush=True)
        time.sleep(8)
        os._exit(0)
    end(number)


def be_survivor(situation, attention, parts, want):
    good = 0
    begin = time.monotonic()
    for _ in range(3):
        begin = time.monotonic()
        try:
            if situation == "in the wait" and good == 0:
                shards = scatter_heads(*parts, **FUSED)
                busy(1.5)
                out, _ = attention_gather(shards)
            else:
                out = attention(*parts)
            torch.cuda.synchronize()
        except Exception as error:  # the context is gone; what is left is the record
            print(f"call {GOOD_CALLS + good + 1}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            break
        good += bool(torch.equal(out, want))
    found = {"good": good, "error": "none", "text": "", "seconds": 0.0}
    try:
        attention(*parts)
    except Exception as error:
        found |= {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    print(json.dumps(found), flush=True)
    os._exit(0)


def other_library(device):
    """NVSHMEM as another library of the process would have started it."""
    import nvshmem.core as nvshmem
    from cuda.core import Device
    from cuda.pathfinder import load_nvidia_dynamic_lib

    os.environ.update({"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_NVLS": "1"})
    rank = dist.get_rank()
    torch.zeros(1, device=device)
    load_nvidia_dynamic_lib("nvshmem_host")
    Device(device.index).set_current()
    box = [nvshmem.get_unique_id(empty=rank != 0)]
    dist.broadcast_object_list(box, src=0)
    nvshmem.init(device=Device(device.index), uid=box[0], rank=rank, nranks=2, initializer_method="uid")


def main(situation, number):
    rank = int(os.environ["RANK"])
    device = join(rank, 2, "cuda")
    if situation == "nvshmem before":
        other_library(device)
    far = situation == "raises"
    attention = UlyssesAttention(**FUSED, timeout_s=60 if far else DEADLINE_S)
    parts = [torch.randn(1, 128, 4, 128, device=device, dtype=torch.bfloat16) for _ in range(3)]
    want = UlyssesAttention(kernel="fa4", exchange="collective", copy=True)(*parts)
    good = sum(bool(torch.equal(attention(*parts), want)) for _ in range(GOOD_CALLS))
    torch.cuda.synchronize()
    dist.barrier()
    if situation in ("nobody", "nvshmem before", "one visible GPU"):
        plan = attention.last_plan
        print(json.dumps({"good": good, "error": "", "text": f"{plan.kernel} {plan.exchange}"}), flush=True)
        os._exit(0)
    if rank == 1:
        be_victim(situation, number, attention, parts)
    else:
        be_survivor(situation, attention, parts, want)


if __name__ == "__main__":
    main(sys.argv[1], signal.Signals[sys.argv[2]])
