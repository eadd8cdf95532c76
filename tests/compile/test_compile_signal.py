import pytest
from cubin import PROXY_FENCE, no_local_memory, opcodes, uses
from device_view import INT, device_view
from fa4_a2a.litmus import VARIANTS, load_litmus
from fa4_a2a.signal import (
    ARRIVED,
    BLOCK_BYTES,
    EPOCH,
    FINGERPRINT,
    MAX_PARTS,
    MAX_RANKS,
    PARTS,
    READY,
    TOLD,
    Failure,
    Flags,
    Record,
    Told,
    Word,
    load_signal,
)

from fa_a2a import layout

ARCHS = ("sm_90a", "sm_100a")


@pytest.mark.parametrize("arch", ARCHS)
def test_signal_orders_its_stores_and_loads(arch, sass):
    load_signal(arch)
    lines = sass(f"signal-{arch}")
    assert no_local_memory(lines)
    strong = [x for x in lines if "STRONG.SYS" in x or "MEMBAR.ALL.SYS" in x or "CCTL.IVALL" in x]
    fence = next(i for i, x in enumerate(strong) if "MEMBAR" in x)
    assert f"+{8 * FINGERPRINT:#x}]" in strong[fence - 1], "the fingerprint goes before the fence"
    word = next(x for x in strong[fence:] if "STG" in x)
    assert f"+{8 * ARRIVED:#x}]" in word, "the epoch goes after it"
    poll = next(i for i, x in enumerate(strong) if "LDG" in x and i > fence)
    assert "CCTL.IVALL" in strong[poll + 1], "the poll acquires"
    assert f"+{8 * FINGERPRINT:#x}]" in strong[poll + 2], "the fingerprint is read after the acquire"
    assert uses(lines, "MEMBAR.ALL.SYS") == 3  # publish, and two around the record's code
    assert uses(lines, "BPT.TRAP") == 1


def test_signal_layout():
    assert EPOCH < TOLD < ARRIVED
    assert ARRIVED + MAX_RANKS == FINGERPRINT
    assert FINGERPRINT + MAX_RANKS == READY
    assert READY + MAX_RANKS == PARTS
    assert 8 * (PARTS + MAX_RANKS * MAX_PARTS) == BLOCK_BYTES == 3072
    assert (PARTS, MAX_PARTS) == (layout.PARTS_WORD, layout.MAX_PARTS)
    assert BLOCK_BYTES == layout.SIGNAL_BYTES
    assert next(iter(Record)) is Record.CODE


def test_kernels_and_library_mean_the_same_words():
    from fa_a2a import layout
    from fa_a2a.comm import nvshmem

    words = (layout.EPOCH_WORD, layout.TOLD_WORD, layout.ARRIVED_WORD, layout.FINGERPRINT_WORD, layout.READY_WORD)
    assert words == (EPOCH, TOLD, ARRIVED, FINGERPRINT, READY)
    assert [(x.name, x.value) for x in Word] == [(x.name, x.value) for x in layout.Word]
    assert [(x.name, x.value) for x in Told] == [(x.name, x.value) for x in layout.Reason]
    assert (nvshmem._MISMATCH, nvshmem._TOLD) == (Failure.FINGERPRINT, Failure.TOLD)


def test_signal_call_reaches_the_launch(no_gpu):
    if not no_gpu:
        pytest.skip("the addresses are made up")
    blocks = device_view((4,), code=INT, bits=64)
    flags = Flags.ADVANCE | Flags.PUBLISH | Flags.WAIT
    with pytest.raises(RuntimeError, match="Cuda"):
        load_signal("sm_90a")(blocks, 0, 4, Word.READY, flags, -(2**63), 30 * 10**9, 1 << 41)
    with pytest.raises((TypeError, ValueError), match=r"#0|peer_blocks"):
        load_signal("sm_90a")(device_view((4,), code=INT, bits=32), 0, 4, 0, 0, 0, 0, 0)


TOP = 2**63


@pytest.mark.parametrize(
    ("found", "epoch", "want"),
    [(5, 5, 1), (6, 5, 1), (5, 6, 0), (0, 1, 0), (TOP - 1, TOP - 1, 1), (TOP, TOP - 1, 1), (TOP - 1, TOP, 0),
     (0, 2 * TOP - 1, 1), (2 * TOP - 1, 0, 0)],
)  # fmt: skip
def test_epochs_compare_across_the_wrap(found, epoch, want):
    """The kernel's own comparison, compiled for this CPU."""
    assert _reached()(found, epoch) == want


@pytest.mark.parametrize("told", [1, 2**32 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("word", Word)
def test_notices_end_the_steps_from_theirs_on(told, word):
    """The kernel's own comparison, compiled for this CPU, against the library's."""
    from host_compare import ended

    from fa_a2a.layout import Notice, Reason

    notice = Notice(Reason.MISSED, 3, 1, 2 * told + word)
    for epoch in (told - 2, told - 1, told, told + 1, told + 9):
        for waited_for in Word:
            assert ended(notice.packed(), epoch, waited_for) == notice.ends(waited_for, epoch), (epoch, waited_for)


def _reached():
    import torch
    from cutlass import Int64
    from cutlass.cute.runtime import from_dlpack
    from host_compare import compare

    def call(found, epoch):
        out = torch.zeros(1, dtype=torch.int32)
        signed = (Int64((x + TOP) % (2 * TOP) - TOP) for x in (found, epoch))
        compare()(from_dlpack(out), *signed)
        return out.item()

    return call


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_litmus_has_the_fences_of_its_variant_and_no_others(arch, variant, sass):
    load_litmus(arch, variant)
    writer, reader = VARIANTS[variant]
    write, read = sass(f"litmus-write-{writer}-{arch}"), sass(f"litmus-read-{reader}-{arch}")
    fences = {op for op in opcodes(write) if op.startswith("MEMBAR")} - {PROXY_FENCE}
    fenced = writer in ("release", "read_fence", "st_release")
    assert fences == ({"MEMBAR.ALL.GPU", "MEMBAR.ALL.SYS"} if fenced else set())
    assert bool(uses(write, "UBLKCP")) == (not writer.startswith("st_"))
    assert uses(read, "MEMBAR.ALL.SYS") == 1, "before the ack"
    if "-" in reader:
        assert uses(read, "UBLKCP") == 8, "data comes by bulk copies"
        # one in the chain before the ack, and one in a proxy fence over all memory
        assert uses(read, "MEMBAR.ALL.GPU") == (2 if reader.endswith("-bulk") else 1)
    else:
        assert uses(read, "LDG.E.64.STRONG.SYS") >= 16, "data is read past L1"
    assert no_local_memory(write)
    assert no_local_memory(read)
