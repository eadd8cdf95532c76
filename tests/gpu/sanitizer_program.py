"""One launch or two of each of the project's kernels on small shapes, for compute-sanitizer: `KERNEL` as argument."""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "cute")]

from fa4_a2a.scatter import load_scatter  # noqa: E402
from fa4_a2a.signal import Flags, Word, load_signal  # noqa: E402
from one_gpu_ranks import Ranks, draw  # noqa: E402
from test_overlap import start  # noqa: E402
from test_persistent import Case, Signals, kernels  # noqa: E402

from fa_a2a.comm.symmetric import Release  # noqa: E402
from fa_a2a.layout import ExchangeShape  # noqa: E402
from fa_a2a.ops.fa3 import FA3  # noqa: E402
from fa_a2a.ops.fused import local_sink  # noqa: E402
from fa_a2a.xstage.tiles import FA3_TILES  # noqa: E402


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


def overlapped(device, arch):
    stock, case, _ = start(device, arch, (2, 160, 1))
    case.arrive()
    case.run(own_first=1, send_pace_ns=1500)
    case.check(stock)


def fa3(device, dim):
    """Each tile: two chunks, rows and keys that end within one, grouped heads, two batch entries, LSE, the release."""
    q = torch.randn(2, 2 * 130, 4, dim, device=device).bfloat16()
    k, v = (torch.randn(2, 333, 2, dim, device=device).bfloat16() for _ in range(2))
    sink, signals = local_sink(ExchangeShape(2, 260, 8, dim, 2, 2), torch.bfloat16, device), Signals(device)
    flags = int(Flags.ADVANCE | Flags.PUBLISH)
    release = Release(signals.table, 1, 4, signals.record.data_ptr(), signals.counter, flags, 10**9)
    for tile in FA3_TILES[dim]:
        kernel = FA3(device, dim, "bfloat16", (tile,))
        want, _ = kernel.local(q, k, v, 0.1, 1, True)
        for launch in kernel.launches(q, k, v, 0.1, sink, True, release):
            launch()
        assert torch.equal(torch.cat(sink.o, 1), want)


KERNELS = {
    "signal": signal,
    "scatter st": lambda device, arch: scatter(device, arch, "st"),
    "scatter bulk": lambda device, arch: scatter(device, arch, "bulk"),
    "persistent 128": lambda device, arch: persistent(device, arch, 128, (128, 160)),
    "persistent 64": lambda device, arch: persistent(device, arch, 64, (192, 128)),
    "persistent 64 small": lambda device, arch: persistent(device, arch, 64, (128, 128)),
    "overlapped": overlapped,
    "fa3 128": lambda device, arch: fa3(device, 128),
    "fa3 64": lambda device, arch: fa3(device, 64),
}

if __name__ == "__main__":
    here = torch.device("cuda", 0)
    KERNELS[sys.argv[1]](here, "sm_{}{}a".format(*torch.cuda.get_device_capability(here)))
    torch.cuda.synchronize()
