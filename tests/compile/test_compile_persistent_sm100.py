"""The persistent kernel for sm_100a: what can be said of it without such a GPU."""

import re

import pytest
from cubin import beyond_what_is_left, no_local_memory, opcodes, uses
from device_view import INT, attention_views, device_view
from fa4_a2a.forward import load_forward
from fa4_a2a.persistent import Build, Order, load_persistent, persistent_tile
from fa4_a2a.signal import READY, Flags
from test_compile_persistent import read as read_any
from test_compile_persistent import registers

ARCH, SMS = "sm_100a", 148
CASES = [  # head_dim, dtype, with_lse, build: the first and the last are those of the fused path
    (128, "bfloat16", True, Build(release=True)),
    (128, "float16", False, Build(pace="clock", slice_rows=32)),
    (64, "bfloat16", True, Build(slice_rows=8)),
    (64, "float16", False, Build(release=True)),
]
P, ROWS, KEYS, HEADS = 4, 1152, 4608, 6


def load(head_dim, dtype, with_lse, build):
    return load_persistent(head_dim, dtype, ARCH, SMS, None, with_lse, build=build)


def read(sass, head_dim, dtype, with_lse, build):
    load(head_dim, dtype, with_lse, build)
    return read_any(sass, head_dim, dtype, None, with_lse, build, ARCH)


@pytest.mark.parametrize(("head_dim", "dtype", "with_lse", "build"), CASES)
def test_persistent_kernel(head_dim, dtype, with_lse, build, sass):
    lines, path = read(sass, head_dim, dtype, with_lse, build)
    assert uses(lines, "UTCHMMA")
    assert uses(lines, "UTMALDG")
    assert uses(lines, "UTMASTG") == head_dim // 64, "one loop over slices"
    assert no_local_memory(lines), "as in the stock kernel: test_compile_forward.py"
    assert registers(path) == 65536 // (16 * 32)
    assert not beyond_what_is_left(path)
    assert uses(lines, "ATOMG") == build.release
    assert uses(lines, "MEMBAR.ALL.SYS") == (3 if build.release else 0), "no fence between tiles"
    assert any("SR_GLOBALTIMERLO" in line for line in lines) == (build.release or build.pace == "clock")


@pytest.mark.parametrize(("head_dim", "dtype", "with_lse", "build"), [CASES[0], CASES[3]])
def test_loads_and_tensor_core_work_are_the_stock_kernels(head_dim, dtype, with_lse, build, sass):
    load_forward(head_dim, dtype, ARCH, SMS, None, with_lse)
    stock = sass(f"forward-{ARCH}-d{head_dim}-{dtype}", with_lse=with_lse)
    ours, _ = read(sass, head_dim, dtype, with_lse, build)
    work = lambda lines: [op for op in opcodes(lines) if op.startswith(("UTCHMMA", "UTMALDG", "MUFU"))]
    assert work(ours) == work(stock)


@pytest.mark.parametrize(("head_dim", "dtype", "with_lse", "build"), [CASES[0], CASES[3]])
def test_release_comes_after_the_stores(head_dim, dtype, with_lse, build, sass):
    """Bulk stores, the correction warps' arrival behind their LSE, the wait that is not .read, the CTA's arrival,
    the fence, the epochs: in this order, and once."""
    lines, _ = read(sass, head_dim, dtype, with_lse, build)
    ops = opcodes(lines)
    last_store = max(i for i, op in enumerate(ops) if op.startswith("UTMASTG"))
    (joined,) = [i for i, line in enumerate(lines) if re.search(r"BAR\.SYNC\S* 0xb, 0xa0", line)]
    (arrival,) = [i for i, op in enumerate(ops) if op.startswith("ATOMG")]
    complete = [i for i in range(joined, arrival) if ops[i] == "DEPBAR.LE" and ops[i + 1] == "CCTL.IVALL"]
    fence = next(i for i in range(arrival, len(ops)) if ops[i].startswith("MEMBAR.ALL.SYS"))
    (epochs,) = [i for i, line in enumerate(lines) if re.search(rf"STG.*STRONG\.SYS.*\+{READY * 8:#x}\]", line)]
    assert complete
    assert last_store < joined < complete[0] < arrival < fence < epochs

    (arrived,) = [i for i, line in enumerate(lines) if re.search(r"BAR\.ARV 0xb, 0xa0", line)]
    lse = [i for i, op in enumerate(ops) if op == "STG.E"]
    assert len(lse) == (2 if with_lse else 0), "one for each buffer"
    assert all(i < arrived for i in lse)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]])
def test_release_fits_the_registers_of_its_warp(case, sass):
    """The warp has given up registers before: what it uses from there to the trap at the very end must be left."""
    lines, _ = read(sass, *case)
    store = next(i for i, op in enumerate(opcodes(lines)) if op.startswith("UTMASTG"))
    begin = max(i for i in range(store) if "USETMAXREG.DEALLOC" in lines[i])
    end = next(i for i in range(store, len(lines)) if "BPT.TRAP" in lines[i])
    left = int(lines[begin].split()[-1], 16)
    assert left == {128: 64, 64: 48}[case[0]]
    assert max(int(n) for line in lines[begin:end] for n in re.findall(r"\bR(\d+)\b", line)) < left


def test_barrier_is_free():
    from fa4_a2a.persistent_sm100 import STORED
    from flash_attn.cute.named_barrier import NamedBarrierFwdSm100

    assert max(NamedBarrierFwdSm100) < STORED < 16


def make(head_dim, **choices):
    from cutlass import BFloat16
    from fa4_a2a.forward_kernels import sm100_options
    from fa4_a2a.persistent_sm100 import PersistentForwardSm100
    from fa4_a2a.toolchain import target

    with target(ARCH):
        options = sm100_options(head_dim, persistent_tile(head_dim, ARCH))
        kernel = PersistentForwardSm100(Build(**choices), **options)
    kernel.dtype = BFloat16
    return kernel


@pytest.mark.parametrize(("head_dim", "slice_rows"), [(128, 16), (64, 8)])
def test_slices_are_what_upstream_stages(head_dim, slice_rows):
    """A bulk store reads a slice as it lies in the buffer: same swizzle, same place of each element."""
    from host_staging import offsets

    kernel = make(head_dim, slice_rows=slice_rows)
    staged, sliced = offsets(kernel, head_dim)
    assert kernel.swizzles[0] == kernel.swizzles[1]
    assert sorted(staged.flatten().tolist()) == list(range(2 * 128 * head_dim))
    for buffer in range(2):
        for row in range(0, 128, slice_rows):
            for column in range(0, head_dim, 64):
                begin = staged[buffer, row, column]
                assert begin * 2 % 1024 == 0
                there = staged[buffer, row : row + slice_rows, column : column + 64]
                assert there.sub(begin).equal(sliced)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 128, 1152, 1160, 4096])
def test_each_row_belongs_to_one_slice(head_dim, rows):
    """Pairs of CTAs with D = 128, and chunks that end within a tile."""
    kernel = make(head_dim)
    ctas = kernel.cta_group_size
    assert ctas == {64: 1, 128: 2}[head_dim]
    slices = -(-rows // 16)
    sent = []
    for tile in range(-(-rows // (256 * ctas))):
        for cta in range(ctas):
            for buffer in range(2):
                first = kernel.first_slice(tile, buffer, cta)
                sent += range(first, first + min(slices - first, kernel.num_slices))
    assert sorted(sent) == list(range(slices))


def test_calls_reach_the_launch(no_gpu):
    if not no_gpu:
        pytest.skip("the addresses are made up")
    attention = attention_views(P, ROWS, HEADS, 128).values()
    blocks, counter = (device_view((n,), code=INT, bits=64) for n in (4, 1))
    publication = (blocks, counter, 1, P, Flags.PUBLISH | Flags.WAIT, 10**9, 1 << 41)
    with pytest.raises(RuntimeError, match="Cuda"):
        load(*CASES[0])(*attention, 1000, publication, order=Order.OWN_LAST, num_sms=100)


@pytest.mark.parametrize(
    "build", [Build(store="step"), Build(barriers="tile"), Build(registers=(232, 40)), Build(stamps=True)]
)
def test_builds_of_sm90_alone_are_refused(build):
    with pytest.raises(ValueError, match="sm_100a"):
        load(128, "bfloat16", True, build)


def test_tiles_of_sm90_alone_are_refused():
    assert persistent_tile(128, ARCH) == (128, 128)
    with pytest.raises(ValueError, match="128x128"):
        persistent_tile(128, ARCH, (128, 160))
    with pytest.raises(ValueError, match="head_dim 96"):
        persistent_tile(96, ARCH)
