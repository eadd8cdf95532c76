from dataclasses import fields

import pytest
from cubin import beyond_what_is_left, cubins, no_local_memory, opcodes, uses
from device_view import FLOAT, INT, attention_views, device_view
from fa4_a2a.cache import cached_kernels
from fa4_a2a.forward import load_forward
from fa4_a2a.persistent import PERSISTENT_TILES, Build, Order, load_persistent, persistent_tile
from fa4_a2a.signal import READY, Flags

from fa_a2a.layout import tile_order

BUILDS = [
    Build(),
    Build(barriers="tile"),
    Build(pace="clock", slice_rows=8),
    Build(registers=(232, 40), slice_rows=32),
    Build(store="step"),
    Build(store="consumer", slice_rows=64),
    Build(stamps=True),
    Build(store="step", stamps=True, registers=(232, 40)),
    Build(release=True),
    Build(store="step", release=True),
]
CASES = [(128, "bfloat16", None, True, build) for build in BUILDS] + [
    (128, "float16", (128, 128), False, Build()),
    (128, "float16", (128, 144), False, Build(release=True)),
    (64, "bfloat16", None, True, Build()),
    (64, "float16", None, False, Build(release=True)),
    (64, "bfloat16", None, False, Build(store="step", release=True)),
    (64, "bfloat16", None, True, Build(store="consumer")),
    (64, "float16", (128, 128), True, Build()),
    (64, "bfloat16", (128, 128), True, Build(release=True)),
    (64, "float16", (128, 128), False, Build(release=True)),
]
P, ROWS, KEYS, HEADS, D = 4, 1152, 4608, 6, 128


def load(head_dim=D, dtype="bfloat16", tile=None, with_lse=True, build=None):
    return load_persistent(head_dim, dtype, "sm_90a", 132, tile, with_lse, build=build or Build())


def read(sass, head_dim, dtype, tile, with_lse, build, arch="sm_90a"):
    stored = [list(x) if isinstance(x, tuple) else x for x in build]
    chosen = list(persistent_tile(head_dim, arch, tile))
    name, key = f"persistent-{arch}-d{head_dim}-{dtype}", {"tile": chosen, "with_lse": with_lse, "build": stored}
    (found,) = [k for k in cached_kernels() if k.name == name and key.items() <= k.key.items()]
    return sass(name, **key), found.path


def registers(path):
    """Registers a thread is launched with: .nv.info's record 0x2f holds (symbol, count)."""
    (image,) = cubins(path.read_bytes())
    at = image.index(b"\x04\x2f\x08\x00")
    return int.from_bytes(image[at + 8 : at + 12], "little")


@pytest.mark.parametrize(("head_dim", "dtype", "tile", "with_lse", "build"), CASES)
def test_persistent_kernel(head_dim, dtype, tile, with_lse, build, sass):
    load(head_dim, dtype, tile, with_lse, build)
    lines, path = read(sass, head_dim, dtype, tile, with_lse, build)
    chosen = persistent_tile(head_dim, "sm_90a", tile)
    assert no_local_memory(lines)
    assert uses(lines, "UTMALDG")
    assert uses(lines, "UTMASTG") == head_dim // 64 * (3 if build.store == "step" else 1), (
        "one loop over slices a place"
    )
    groups = chosen.rows // 64
    consumer, producer = build.registers or {2: (240, 24), 3: (160, 32)}[groups]
    changed = [line for line in lines if "SETMAXREG" in line]
    assert len(changed) == 2, "setmaxnreg is not ignored"
    assert f"{producer:#x}" in changed[0]
    assert f"{consumer:#x}" in changed[1]
    assert registers(path) == 65536 // (128 * (groups + 1)) // 8 * 8
    assert not beyond_what_is_left(path)
    assert bool(uses(lines, "ATOMG")) == build.release
    assert uses(lines, "MEMBAR.ALL.SYS") == (3 if build.release else 0), "no fence between tiles"


@pytest.mark.parametrize(("head_dim", "tile"), [(128, (128, 160)), (64, (192, 128)), (64, (128, 128))])
def test_tensor_core_work_is_the_stock_kernels(head_dim, tile, sass):
    load(head_dim, "bfloat16", tile, True)
    load_forward(head_dim, "bfloat16", "sm_90a", 132, tile, True)
    stock = sass(f"forward-sm_90a-d{head_dim}-bfloat16", tile=list(tile), with_lse=True)
    ours, _ = read(sass, head_dim, "bfloat16", tile, True, Build())
    mma = lambda lines: [op for op in opcodes(lines) if op.startswith("HGMMA")]
    assert mma(ours) == mma(stock)


@pytest.mark.parametrize("store", ["warp", "step"])
def test_release_comes_after_the_stores(store, sass):
    """Complete bulk stores, arrival, fence, epochs to the peers: in this order, and once."""
    build = Build(store=store, release=True)
    load(build=build)
    lines, _ = read(sass, D, "bfloat16", None, True, build)
    ops = opcodes(lines)
    arrival = next(i for i, op in enumerate(ops) if op.startswith("ATOMG"))
    stores = [i for i, op in enumerate(ops) if op.startswith("UTMASTG")]
    waits = [i for i, op in enumerate(ops) if op.startswith("DEPBAR") and max(stores) < i < arrival]
    assert waits, "the non-.read wait"
    fence = next(i for i in range(arrival, len(ops)) if ops[i].startswith("MEMBAR.ALL.SYS"))
    words = [i for i, line in enumerate(lines) if "STRONG.SYS" in line and f"+{8 * READY:#x}]" in line]
    published = [i for i in words if ops[i].startswith("STG")]
    assert published or any(ops[i].startswith("STG") for i in range(fence, len(ops))), "the epochs"
    assert all(i > fence for i in published)


def test_tiles_are_those_that_leave_room_for_the_output():
    assert PERSISTENT_TILES == {128: ((128, 160), (128, 144), (128, 128)), 64: ((192, 128), (128, 128))}


@pytest.mark.parametrize(
    ("blocks", "heads", "chunks"), [(9, 6, 4), (1, 1, 1), (3, 2, 1), (1, 5, 2), (2, 1, 8), (7, 3, 3)]
)
def test_tile_orders(blocks, heads, chunks):
    from host_order import places

    every = [(c, h, b) for c in range(chunks) for h in range(heads) for b in range(blocks)]
    assert places(blocks, heads, chunks, Order.OWN_FIRST) == every
    rows = 128 * blocks
    last = [(t.chunk, t.head, t.row // 128) for t in tile_order(chunks, heads, rows, 128)]
    assert places(blocks, heads, chunks, Order.OWN_LAST) == last
    remote = [(c, h, b) for h in range(heads) for c in range(1, chunks) for b in range(blocks)]
    assert places(blocks, heads, chunks, Order.OWN_LAST_BY_HEAD) == remote + every[: heads * blocks]


@pytest.fixture
def arguments():
    return attention_views(P, ROWS, HEADS, D)


def test_calls_reach_the_launch(arguments, no_gpu):
    if not no_gpu:
        pytest.skip("the addresses are made up")
    with pytest.raises(RuntimeError, match="Cuda"):
        load()(*arguments.values(), 3000, order=Order.OWN_LAST, num_sms=100)
    stamped = load(build=Build(stamps=True))
    words = stamped.stamp_words(P, ROWS, HEADS)
    assert words == 16 * P * 9 * HEADS
    with pytest.raises(RuntimeError, match="Cuda"):
        stamped(*arguments.values(), 3000, stamps=device_view((words,), code=INT, bits=64))
    blocks, counter = (device_view((n,), code=INT, bits=64) for n in (4, 1))
    flags = Flags.PUBLISH | Flags.WAIT
    publication = (blocks, counter, 1, P, flags, 10**9, 1 << 41)
    with pytest.raises(RuntimeError, match="Cuda"):
        load(build=Build(release=True))(*arguments.values(), 0, publication)
    with pytest.raises((ValueError, TypeError)):
        load(build=Build(release=True))(*arguments.values(), 0)


def test_a_release_has_one_order():
    """What the library hands over, what the launch takes and what the kernel reads."""
    from fa4_a2a.persistent import NO_PUBLICATION
    from fa4_a2a.persistent_schedule import Release as InKernel

    from fa_a2a.comm.symmetric import Release

    assert [field.name for field in fields(InKernel)] == list(Release._fields)
    assert len(NO_PUBLICATION) == len(Release._fields)


WRONG = {
    "lse": lambda: device_view((P, HEADS, ROWS + 1), code=FLOAT, bits=32),
    "k": lambda: device_view((P, KEYS, HEADS + 1, D)),
    "o": lambda: device_view((P, ROWS, HEADS, D), (2**36, P * HEADS * D + 4, D, 1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_call_names_a_wrong_argument(name, arguments):
    with pytest.raises((ValueError, TypeError), match=rf"{name}|argument #{list(arguments).index(name)}"):
        load()(*{**arguments, name: WRONG[name]()}.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": (128, 176)}, "128x160"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"dtype": "float32"}, "float32"),
        ({"build": Build(store="tma")}, "warp, step, consumer"),
        ({"build": Build(barriers="warp")}, "group, tile"),
        ({"build": Build(pace="never")}, "sleep, clock"),
        ({"build": Build(slice_rows=24)}, "slice_rows"),
        ({"build": Build(store="consumer", release=True)}, "producer warp"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before(change, message):
    with pytest.raises(ValueError, match=message):
        load(**change)


def test_other_architectures_are_refused():
    with pytest.raises(ValueError, match="sm_80"):
        load_persistent(128, "bfloat16", "sm_80", 108)
