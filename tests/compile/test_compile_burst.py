import pytest
from cubin import no_local_memory, opcodes, uses
from device_view import INT, device_view
from fa4_a2a.burst import LOAD_BYTES, MAX_BURST_BYTES, STORES, SUMMARY_WORDS, THREADS, Flags, Summary, load_burst

ARCHS = ("sm_90a", "sm_100a")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("store", STORES)
def test_burst_stores_and_fences_as_its_kind_says(arch, store, sass):
    load_burst(arch, store)
    lines = sass(f"burst-{store}-{arch}")
    assert no_local_memory(lines)
    assert bool(uses(lines, "STG.E.128")) == (store == "st")
    assert uses(lines, "UBLKCP.G.S") == (store == "bulk")
    assert uses(lines, "UBLKCP.S.G") == 1, "the load"
    assert uses(lines, "MEMBAR.ALL.SYS") == 1, "behind FENCE only: any other would couple issue to completion"
    assert not uses(lines, "MEMBAR.ALL.GPU")
    assert not uses(lines, "BPT.TRAP"), "a launch that fails says so in its summary"


@pytest.mark.parametrize("store", STORES)
def test_clocks_enclose_the_stores(store, sass):
    """The clock is read, then come the stores, then what waits for them, then the clock again."""
    load_burst("sm_90a", store)
    lines = sass(f"burst-{store}-sm_90a")
    clock = [i for i, line in enumerate(lines) if "SR_CLOCKLO" in line]
    kind = "STG.E.128" if store == "st" else "UBLKCP.G.S"
    stores = [i for i, op in enumerate(opcodes(lines)) if op.startswith(kind)]
    begin = max(i for i in clock if i < stores[0])
    wait = "BAR.SYNC" if store == "st" else "DEPBAR.LE"
    waited = next(i for i in range(stores[-1], len(lines)) if opcodes(lines)[i].startswith(wait))
    assert any(op.startswith("BAR.SYNC") for op in opcodes(lines)[begin - 3 : begin]), "all threads start together"
    assert any(i > waited for i in clock)
    between = [i for i in clock if stores[0] < i < waited]
    assert store == "bulk" or not between  # bulk: the load's own clocks


def test_burst_layout():
    assert len(Summary) <= SUMMARY_WORDS
    assert MAX_BURST_BYTES % (8 * THREADS) == 0
    assert 2 * (MAX_BURST_BYTES + LOAD_BYTES) > 228 * 1024, "one block on each SM"
    assert sorted(flag.value for flag in Flags) == [1, 2, 4, 8]


def words(count=1024):
    return device_view((count,), code=INT, bits=64)


NUMBERS = (1 << 40, 132, 3, 10, 1, 32768, 7, 132 * 32768, 0, 0, int(Flags.FENCE), 10**9)


@pytest.mark.parametrize("store", STORES)
def test_burst_call_reaches_the_launch(store, no_gpu):
    if not no_gpu:
        pytest.skip("the addresses are made up")
    with pytest.raises(RuntimeError, match="Cuda"):
        load_burst("sm_90a", store)(words(3), words(), words(), words(), words(2), *NUMBERS)
    narrow = device_view((3,), code=INT, bits=32)
    with pytest.raises((TypeError, ValueError), match=r"#0|targets"):
        load_burst("sm_90a", store)(narrow, words(), words(), words(), words(2), *NUMBERS)


def test_unknown_store():
    with pytest.raises(ValueError, match="st, bulk, not 'tma'"):
        load_burst("sm_90a", "tma")
