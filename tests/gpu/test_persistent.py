"""The persistent kernel on one GPU, all chunks local: bitwise equal to the stock kernel with the same key tile."""

from functools import cache

import pytest
import torch

PACES_NS = (0, 1500, 3000)
RANKS = 4
TOP = 2**63

SHAPES = [  # chunks, rows, heads, keys
    (1, 1, 1, 1),
    (1, 128, 1, 160),
    (2, 129, 1, 333),
    (3, 1, 4, 640),
    (8, 127, 6, 1016),
    (5, 300, 3, 1500),
    (4, 1152, 6, 4608),
    (1, 1152, 5, 1000),
]
BUILDS = {  # fields of fa4_a2a.persistent.Build
    "default": {},
    "one barrier": {"barriers": "tile"},
    "clock": {"pace": "clock"},
    "slices of 8": {"slice_rows": 8},
    "slices of 64": {"slice_rows": 64},
    "registers": {"registers": (232, 40)},
    "step": {"store": "step"},
    "step, slices of 32": {"store": "step", "slice_rows": 32},
    "consumer": {"store": "consumer"},
}
OTHERS = [  # head_dim, dtype, tile, build
    (128, torch.float16, (128, 128), "default"),
    (128, torch.bfloat16, (128, 144), "step"),
    (64, torch.bfloat16, (192, 128), "default"),
    (64, torch.float16, (192, 128), "one barrier"),
    (64, torch.float16, (192, 128), "step"),
    (64, torch.bfloat16, (128, 128), "default"),
]


@cache
def kernels(arch, dim, dtype, tile, build, with_lse=True, **more):
    """(stock, persistent)"""
    from fa4_a2a.forward import load_forward
    from fa4_a2a.persistent import Build, load_persistent

    name = str(dtype).removeprefix("torch.")
    made = Build(**{**BUILDS[build], **more})
    stock = load_forward(dim, name, arch, 132, tile, with_lse)
    return stock, load_persistent(dim, name, arch, 132, tile, with_lse, build=made)


class Case:
    """Inputs, and outputs whose chunks lie apart: rows and heads between them belong to nobody and stay as they are."""

    def __init__(self, device, chunks, rows, heads, keys, dim, dtype, with_lse=True):
        torch.manual_seed(rows + keys)
        self.scale, self.shape = dim**-0.5, (chunks, rows, heads, dim)
        self.q = torch.randn(chunks, rows, heads, dim, device=device).to(dtype)
        self.k, self.v = (
            torch.randn(1, keys, heads, dim, device=device).to(dtype).expand(chunks, -1, -1, -1) for _ in range(2)
        )
        self.all_o = torch.empty(chunks, rows + 3, heads + 1, dim, device=device, dtype=dtype)
        self.all_lse = torch.empty(chunks, heads + 1, rows + 5, device=device)
        self.o, self.lse = self.all_o[:, :rows, 1:], self.all_lse[:, 1:, :rows] if with_lse else None

    def poison(self):
        for t in (self.all_o, self.all_lse):
            t.view(torch.uint8).fill_(0xFF)

    def run(self, kernel, *arguments, **options):
        """Bits of everything, with what lies between the chunks."""
        self.poison()
        kernel(self.q, self.k, self.v, self.o, self.lse, self.scale, *arguments, **options)
        return self.all_o.view(torch.int16).clone(), self.all_lse.view(torch.int32).clone()

    def compare(self, stock, persistent, paces, orders, **options):
        want = self.run(stock)
        assert not self.o.isnan().any()
        for pace_ns in paces:
            for order in orders:
                for what, expected, got in zip(
                    ("o", "lse"), want, self.run(persistent, pace_ns, order=order, **options)
                ):
                    assert torch.equal(expected, got), (
                        f"{what} differs at {self.shape}, pace {pace_ns}, order {order}, in "
                        f"{int((expected != got).sum())} of {got.numel()} places"
                    )


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_stock_kernel_bitwise(device, arch, build, shape):
    stock, persistent = kernels(arch, 128, torch.bfloat16, (128, 160), build)
    Case(device, *shape, 128, torch.bfloat16).compare(stock, persistent, PACES_NS, (0, 1, 2))


@pytest.mark.parametrize(("dim", "dtype", "tile", "build"), OTHERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_other_heads_types_and_tiles(device, arch, dim, dtype, tile, build, shape):
    stock, persistent = kernels(arch, dim, dtype, tile, build)
    Case(device, *shape, dim, dtype).compare(stock, persistent, (0, 1500), (1,))


@pytest.mark.parametrize("build", ["default", "step"])
@pytest.mark.parametrize("num_sms", [1, 7, 131, 1000])
def test_any_number_of_ctas(device, arch, build, num_sms):
    """1: one CTA takes every tile, so every hand-over but the last is a paced one. 1000: more CTAs than SMs."""
    stock, persistent = kernels(arch, 128, torch.bfloat16, (128, 160), build)
    shape = (3, 300, 2, 500) if num_sms == 1 else (4, 640, 5, 1100)
    Case(device, *shape, 128, torch.bfloat16).compare(stock, persistent, (0, 2000), (0, 1), num_sms=num_sms)


@pytest.mark.parametrize("build", ["default", "step", "consumer"])
def test_repeated_launches(device, arch, build):
    stock, persistent = kernels(arch, 128, torch.bfloat16, (128, 160), build)
    case = Case(device, 4, 1152, 6, 4608, 128, torch.bfloat16)
    want = case.run(stock)
    for n in range(100):
        got = case.run(persistent, PACES_NS[n % 3], order=n % 2 + 1)
        assert all(torch.equal(a, b) for a, b in zip(want, got)), f"launch {n}"


def test_without_lse(device, arch):
    stock, persistent = kernels(arch, 128, torch.bfloat16, (128, 160), "default", False)
    Case(device, 4, 300, 3, 1200, 128, torch.bfloat16, False).compare(stock, persistent, (0, 1500), (1,))


@pytest.mark.parametrize("build", ["default", "step"])
def test_stamps_are_in_order(device, arch, build):
    from fa4_a2a.persistent import STAMP_WORDS, Stamp

    stock, persistent = kernels(arch, 128, torch.bfloat16, (128, 160), build, stamps=True)
    case = Case(device, 4, 1152, 6, 4608, 128, torch.bfloat16)
    stamps = torch.full((persistent.stamp_words(4, 1152, 6),), -1, dtype=torch.int64, device=device)
    case.compare(stock, persistent, (1500,), (1,), stamps=stamps)
    tiles = stamps.view(-1, STAMP_WORDS).tolist()
    assert len(tiles) == 4 * 6 * 9
    assert {words[Stamp.CTA] for words in tiles} == set(range(132))
    for words in tiles:
        assert words[Stamp.WANTED] <= words[Stamp.GOT]
        assert words[Stamp.WANTED + 1] <= words[Stamp.GOT + 1]
        assert words[Stamp.FULL] <= words[Stamp.FIRST] <= words[Stamp.LAST] <= words[Stamp.READ]


# -- release -----------------------------------------------------------------------------------------------------------


class Signals:
    """Signal blocks of several ranks, all in this GPU's memory; the kernel plays rank 1."""

    rank = 1

    def __init__(self, device):
        from fa4_a2a.signal import BLOCK_WORDS, RECORD_WORDS

        self.blocks = torch.zeros(RANKS, BLOCK_WORDS, dtype=torch.int64, device=device)
        self.table = torch.tensor([b.data_ptr() for b in self.blocks], dtype=torch.int64, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=True)

    def publication(self, flags, deadline_ns=5 * 10**9):
        return self.table, self.counter, self.rank, RANKS, int(flags), deadline_ns, self.record.data_ptr()


@pytest.mark.parametrize("build", ["default", "step"])
@pytest.mark.parametrize("epoch", [1, 42, TOP - 1, -TOP])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (4, 1152, 6, 4608), (8, 127, 3, 700)])
def test_release_publishes_the_epoch_to_every_rank(device, arch, build, epoch, shape):
    from fa4_a2a.signal import EPOCH, READY, Flags

    stock, persistent = kernels(arch, 128, torch.bfloat16, (128, 160), build, release=True)
    case, signals = Case(device, *shape, 128, torch.bfloat16), Signals(device)
    want = case.run(stock)
    signals.blocks[:, EPOCH] = epoch
    for flags in (0, Flags.PUBLISH, Flags.PUBLISH | Flags.WAIT):
        before = signals.blocks.clone()
        if Flags.WAIT in Flags(flags):  # the peers have published already
            before[signals.rank, READY : READY + RANKS] = epoch
            signals.blocks.copy_(before)
        got = case.run(persistent, 1500, signals.publication(flags))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(want, got))
        if flags:
            before[:, READY + signals.rank] = epoch
        assert torch.equal(signals.blocks, before)
        assert signals.counter.item() == 0, "the counter is reset"
        assert not signals.record.any()


def test_graph_replays_advance(device, arch):
    from fa4_a2a.signal import EPOCH, READY, Flags

    stock, persistent = kernels(arch, 128, torch.bfloat16, (128, 160), "default", release=True)
    case, signals = Case(device, 4, 300, 6, 1200, 128, torch.bfloat16), Signals(device)
    want = case.run(stock)
    call = (case.q, case.k, case.v, case.o, case.lse, case.scale, 1500)
    persistent(*call, signals.publication(Flags.ADVANCE | Flags.PUBLISH))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            persistent(*call, signals.publication(Flags.ADVANCE | Flags.PUBLISH))
    for n in range(1, 20):
        case.poison()
        graph.replay()
        assert torch.equal(case.all_o.view(torch.int16), want[0])
        assert signals.blocks[signals.rank, EPOCH] == 1 + 3 * n
        assert (signals.blocks[:, READY + signals.rank] == 1 + 3 * n).all()
