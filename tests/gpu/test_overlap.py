"""The overlapped kernel on one GPU: it plays one rank, and the peers' parts come when the test says.

Own chunks in the workspace hold NaN: what the kernel reads of them must be the inputs, or rows it copied itself."""

from functools import cache

import pytest
import torch

EPOCH_BEFORE, MARK = 41, 0x5EED
SHAPES = [  # ranks, rows of a rank, local heads
    (2, 2304, 12),
    (4, 1152, 6),
    (8, 576, 3),
    (2, 160, 1),
    (2, 1, 1),
    (3, 37, 2),
    (4, 333, 5),
    (2, 801, 3),
]


@cache
def kernels(arch, dtype=torch.bfloat16, with_lse=True):
    """(stock, overlapped)"""
    from fa4_a2a.forward import load_forward
    from fa4_a2a.overlap import load_overlap

    name = str(dtype).removeprefix("torch.")
    return load_forward(128, name, arch, 132, (128, 160), with_lse), load_overlap(128, name, arch, 132, None, with_lse)


class Rank:
    """Everything of one rank's call, the peers' memory included."""

    def __init__(self, device, kernel, ranks, rows, heads, rank, kv_parts=2, queries_first=0, fused=False):
        from fa4_a2a.overlap import Geometry, OverlapPlan, send_order, whole_parts
        from fa4_a2a.signal import BLOCK_WORDS, EPOCH, FINGERPRINT, RECORD_WORDS

        from fa_a2a.ops.overlap import words

        torch.manual_seed(rows + ranks)
        self.ranks, self.rows, self.heads, self.rank, self.device = ranks, rows, heads, rank, device
        self.kernel, self.keys = kernel, ranks * rows
        self.sources = [(rank + c) % ranks for c in range(ranks)]
        whole = torch.randn(self.keys, 3, ranks * heads, 128, device=device).bfloat16()
        self.qkv = whole.unbind(1) if fused else [x.contiguous() for x in whole.unbind(1)]
        self.buffers = torch.full((3, ranks, self.keys, heads, 128), float("nan"), device=device).bfloat16()
        self.blocks = torch.zeros(ranks, BLOCK_WORDS, dtype=torch.int64, device=device)
        self.blocks[rank, EPOCH] = EPOCH_BEFORE
        self.blocks[rank, FINGERPRINT : FINGERPRINT + ranks] = MARK
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=True)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        kv_parts = whole_parts(heads, kv_parts)
        geometry = Geometry(rows, heads, 128, ranks, 160, kv_parts)
        self.own_rows, self.kv_parts = geometry.own_rows, kv_parts
        addresses = [b.data_ptr() for b in self.blocks]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.plan = OverlapPlan(
            kernel,
            geometry,
            send_order(ranks, kv_parts, queries_first, geometry.own_rows > 0),
            self.sources,
            [(rank - p) % ranks for p in range(ranks)],
            [[self.buffers[t, p].data_ptr() for p in range(ranks)] for t in range(3)],
            [words(block, rank) for block in addresses],
            device,
        )
        self.o = torch.full((ranks, rows, heads, 128), float("nan"), device=device).bfloat16()
        self.lse = torch.full((ranks, heads, rows), float("nan"), device=device)
        self.fill()

    def of(self, tensor, source, owner):
        """What `source` has of `owner`'s heads."""
        rows = slice(source * self.rows, (source + 1) * self.rows)
        return self.qkv[tensor][rows, owner * self.heads : (owner + 1) * self.heads]

    def place(self, tensor, chunk):
        first = chunk * self.rows if tensor == 0 else self.keys - (chunk + 1) * self.rows
        return slice(first, first + self.rows)

    def fill(self):
        """The peers' q, k, v in this rank's buffers."""
        for tensor in range(3):
            for chunk, source in enumerate(self.sources[1:], 1):
                self.buffers[tensor, self.rank, self.place(tensor, chunk)] = self.of(tensor, source, self.rank)

    def want_buffers(self):
        wanted = self.buffers.clone()
        for tensor in range(3):
            for chunk in range(1, self.ranks):
                peer = (self.rank - chunk) % self.ranks
                wanted[tensor, peer, self.place(tensor, chunk)] = self.of(tensor, self.rank, peer)
            if tensor:
                own = self.place(tensor, 0).start
                wanted[tensor, self.rank, own : own + self.own_rows] = self.of(tensor, self.rank, self.rank)[
                    : self.own_rows
                ]
        return wanted

    def want_output(self, stock):
        q = torch.stack([self.of(0, source, self.rank) for source in self.sources])
        k, v = (torch.cat([self.of(t, s, self.rank) for s in self.sources[::-1]])[None] for t in (1, 2))
        o, lse = torch.empty_like(self.o), torch.empty_like(self.lse)
        stock(q, *(x.expand(self.ranks, -1, -1, -1) for x in (k, v)), o, lse, 128**-0.5)
        return o, lse

    def words(self):
        """Index of the word of each (chunk, part) that this rank waits for."""
        from fa4_a2a.signal import MAX_PARTS, PARTS

        parts = range(self.kv_parts + 1)
        return {(c, i): PARTS + MAX_PARTS * self.sources[c] + i for c in range(1, self.ranks) for i in parts}

    def arrive(self):
        for at in self.words().values():
            self.blocks[self.rank, at] = EPOCH_BEFORE + 1

    def run(self, own_first=0, send_pace_ns=0, num_sms=132, flags=3):
        own = slice(self.rank * self.rows, (self.rank + 1) * self.rows)
        inputs = [x[None, own] for x in self.qkv]
        q, k, v = self.buffers[:, self.rank]
        attention = (
            q.view(self.o.shape), *(x[None].expand(self.ranks, -1, -1, -1) for x in (k, v)),
            self.o, self.lse, 128**-0.5, 1500, own_first, num_sms,
        )  # fmt: skip
        publication = (
            self.table, self.counter, self.rank, self.ranks, flags, 5 * 10**9, self.record.data_ptr()
        )  # fmt: skip
        self.plan(attention, inputs, send_pace_ns, MARK, publication)

    def check(self, stock):
        from fa4_a2a.overlap import Counter
        from fa4_a2a.signal import ARRIVED, EPOCH, FINGERPRINT, MAX_PARTS, PARTS, READY

        torch.cuda.synchronize()
        assert not self.record.any()
        o, lse = self.want_output(stock)
        assert not o.isnan().any()
        for name, want, got in (("o", o, self.o), ("lse", lse, self.lse)):
            assert torch.equal(want, got), f"{name} differs in {int((want != got).sum())} of {got.numel()} places"
        assert self.blocks[self.rank, EPOCH] == EPOCH_BEFORE + 1
        for peer in range(self.ranks):
            block = self.blocks[peer]
            assert block[ARRIVED + self.rank] == EPOCH_BEFORE + 1
            assert block[READY + self.rank] == EPOCH_BEFORE + 1
            assert block[FINGERPRINT + self.rank] == MARK
            if peer != self.rank:
                at = PARTS + MAX_PARTS * self.rank
                assert (block[at : at + self.kv_parts + 1] == EPOCH_BEFORE + 1).all()
        assert not self.counter.any()
        assert not self.plan._tables[2].any(), f"counters from {Counter.TICKET!r} on are reset"


def start(device, arch, shape, **options):
    stock, overlapped = kernels(arch)
    ranks, rows, heads = shape
    case = Rank(device, overlapped, ranks, rows, heads, min(1, ranks - 1), **options)
    return stock, case, case.want_buffers()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"kv_parts": 4, "queries_first": 1, "fused": True}])
def test_output_and_what_is_sent(device, arch, shape, options):
    stock, case, wanted = start(device, arch, shape, **options)
    case.arrive()
    case.run(own_first=shape[2] * 5, send_pace_ns=0 if options else 1500)
    case.check(stock)
    got = case.buffers.view(torch.int16)
    assert torch.equal(got, wanted.view(torch.int16)), f"{int((got != wanted.view(torch.int16)).sum())} elements"


@pytest.mark.parametrize("num_sms", [1, 7, 131])
@pytest.mark.parametrize("own_first", [0, 3, 10**6])
def test_any_number_of_ctas_and_own_tiles_first(device, arch, num_sms, own_first):
    stock, case, wanted = start(device, arch, (3, 300, 2))
    case.arrive()
    case.run(own_first, num_sms=num_sms)
    case.check(stock)
    assert torch.equal(case.buffers.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", [(2, 2304, 12), (4, 333, 5)])
def test_parts_that_come_late_and_in_any_order(device, arch, shape, backwards):
    """The peers' rows are NaN when the kernel starts, and are copied in part by part, each before its word."""
    stock, case, _ = start(device, arch, shape)
    ready = case.buffers[:, case.rank].clone()
    epoch = torch.full((1,), EPOCH_BEFORE + 1, dtype=torch.int64, device=device)

    def come():
        for (chunk, part), at in sorted(case.words().items(), reverse=backwards):
            torch.cuda._sleep(100_000)
            group = -(-case.heads // case.kv_parts)
            heads = slice(None) if part == case.kv_parts else slice(part * group, (part + 1) * group)
            for tensor in (0,) if part == case.kv_parts else (1, 2):
                place = case.place(tensor, chunk)
                case.buffers[tensor, case.rank, place, heads].copy_(ready[tensor, place, heads])
            case.blocks[case.rank, at : at + 1].copy_(epoch)

    come()  # CUDA loads a kernel at its first launch, and may not do so while another one waits
    case.blocks[case.rank, min(case.words().values()) : max(case.words().values()) + 1] = 0
    case.buffers[:, case.rank] = float("nan")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    case.run(num_sms=100)  # copies within the device may need SMs
    with torch.cuda.stream(side):
        come()
    case.check(stock)


def test_repeated_calls_and_graph_replays(device, arch):
    from fa4_a2a.signal import EPOCH

    stock, case, _ = start(device, arch, (2, 1000, 4))
    o, lse = case.want_output(stock)
    words = list(case.words().values())

    def call():
        for at in words:
            case.blocks[case.rank, at] = case.blocks[case.rank, EPOCH] + 1
        case.run(own_first=16)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call()
    for n in range(30):
        case.o.fill_(float("nan"))
        graph.replay()
        assert torch.equal(case.o, o)
        assert torch.equal(case.lse, lse)
        assert case.blocks[case.rank, EPOCH] == EPOCH_BEFORE + 1 + 3 * (n + 1)
