"""One launch or two of each of the project's kernels on small shapes, for compute-sanitizer: `KERNEL` as argument."""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "cute")]

from fa4_a2a.scatter import load_scatter  # noqa: E402
from fa4_a2a.signal import Flags, Word, load_signal  # noqa: E402
from one_gpu_ranks import Ranks, draw  # noqa: E402
from test_persistent import Case, Signals, kernels  # noqa: E402


def signal(device, arch):
    signals = Signals(device)
    for word in Word:
        load_signal(arch)(
            signals.table, 1, 4, word, int(Flags.ADVANCE | Flags.PUBLISH), 7, 10**9, signals.record.data_ptr()
        )


def scatter(device, arch, path):
    shape, dtype = (2, 37, 6, 64), torch.bfloat16
    group = Ranks(load_scatter(64, "bfloat16", arch, path), device, *shape, 3, dtype)
    qkv = [draw(device, shape, dtype, "fused") for _ in range(3)]
    for plan, tensors in zip(group.plans, qkv):
        plan(*tensors, flags=0)
    group.check(qkv)


def persistent(device, arch, dim, tile):
    stock, ours = kernels(arch, dim, torch.bfloat16, tile, "default", release=True)
    case, signals = Case(device, 2, 129, 2, 258, dim, torch.bfloat16), Signals(device)
    want = case.run(stock)
    got = case.run(ours, 1500, signals.publication(Flags.PUBLISH))
    assert all(torch.equal(a, b) for a, b in zip(want, got))


KERNELS = {
    "signal": signal,
    "scatter st": lambda device, arch: scatter(device, arch, "st"),
    "scatter bulk": lambda device, arch: scatter(device, arch, "bulk"),
    "persistent 128": lambda device, arch: persistent(device, arch, 128, (128, 160)),
    "persistent 64": lambda device, arch: persistent(device, arch, 64, (192, 128)),
}

if __name__ == "__main__":
    here = torch.device("cuda", 0)
    KERNELS[sys.argv[1]](here, "sm_{}{}a".format(*torch.cuda.get_device_capability(here)))
    torch.cuda.synchronize()
