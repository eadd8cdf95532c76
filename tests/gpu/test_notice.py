"""Waits that end early, and what a wait that fails tells the others. The signal blocks lie in pinned host memory, which
outlives the CUDA context that the kernel's trap ends; each case runs in a process of its own."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fa4_a2a.signal import READY, TOLD, Failure, Flags, Record, Word

from fa_a2a.layout import Notice, Reason
from fa_a2a.native.build import TILES, build, variants
from fa_a2a.ops import kernels

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import json, os, sys, torch
sys.path[:0] = [{root!r}, {root!r} + "/cute"]
from fa4_a2a.signal import *
from fa4_a2a.persistent import Build, load_persistent
arguments = json.loads(sys.argv[1])
signal = load_signal("sm_{{}}{{}}a".format(*torch.cuda.get_device_capability()))
blocks = torch.zeros(3, BLOCK_WORDS, dtype=torch.int64, pin_memory=True)
record = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=True)
table = torch.tensor([b.data_ptr() for b in blocks], dtype=torch.int64, device="cuda")
blocks[0, EPOCH] = arguments["epoch"] - (1 if arguments["flags"] & 1 else 0)
blocks[0, TOLD] = arguments["told"]
torch.cuda.synchronize()
if arguments["fa3"]:
    from fa_a2a.native.build import Variant, load
    rows, keys, dim = arguments["fa3"]
    q = torch.zeros(1, 1, 128, 1, dim, dtype=torch.bfloat16, device="cuda")
    o, counter = torch.empty_like(q[0]), torch.zeros(1, dtype=torch.int64, device="cuda")
    places = torch.tensor([[o.data_ptr()], [0]])
    end = (0, 3, arguments["flags"], arguments["deadline_ns"], record.data_ptr())
    load(Variant(dim, "bfloat16", (rows, keys)))(q, q[0], q[0], o, places, None, 0.1, 0, 1, 132, table, counter, *end)
elif arguments["attention"]:
    q = torch.zeros(1, 128, 1, arguments["attention"], dtype=torch.bfloat16, device="cuda")
    arch = "sm_{{}}{{}}a".format(*torch.cuda.get_device_capability())
    attend = load_persistent(arguments["attention"], "bfloat16", arch, 1, build=Build(release=True))
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    publication = (table, counter, 0, 3, arguments["flags"], arguments["deadline_ns"], record.data_ptr())
    attend(q, q, q, torch.empty_like(q), None, 0.1, 0, publication)
else:
    signal(table, 0, 3, arguments["word"], arguments["flags"], 5, arguments["deadline_ns"], record.data_ptr())
try:
    torch.cuda.synchronize()
except Exception:
    pass
print(json.dumps([record.tolist(), blocks.tolist()]), flush=True)
os._exit(0)
"""


FA3 = [(*tile, head_dim) for head_dim, tiles in TILES.items() for tile in tiles]


@pytest.fixture
def fa3(device, need):
    for _, _, head_dim in FA3:
        trouble = kernels.problem("fa3", device, torch.bfloat16, head_dim, False)
        need("gpu", trouble is None, str(trouble))
        for variant in variants(head_dim, "bfloat16"):
            build(variant)


def wait(word, epoch, told=0, deadline_ns=60 * 10**9, attention=0, fa3=None):
    """(record, signal blocks, seconds) of a wait of rank 0 for two peers that never come. attention: head_dim of an
    attention kernel that waits at its end, in place of the signal kernel. fa3: (rows, keys, head_dim) of a tile of that
    kernel."""
    flags = int(Flags.PUBLISH | Flags.WAIT | (Flags.ADVANCE if word is Word.ARRIVED else 0))
    arguments = {"word": int(word), "epoch": epoch, "told": told, "flags": flags, "deadline_ns": deadline_ns}
    arguments |= {"attention": attention, "fa3": fa3}
    command = [sys.executable, "-c", _PROGRAM.format(root=str(ROOT)), json.dumps(arguments)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout, done.stderr
    return *json.loads(done.stdout), time.monotonic() - began


@pytest.mark.parametrize("epoch", [1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("word", Word)
def test_a_notice_ends_the_wait_and_is_in_the_record(device, word, epoch):
    told = Notice(Reason.FAILED, 2, 0, 2 * epoch + word)
    signed = told.packed() - (1 << 64) if told.packed() >> 63 else told.packed()
    record, _, seconds = wait(word, epoch, signed)
    assert (record[Record.CODE], record[Record.WORD]) == (Failure.TOLD, word)
    assert record[Record.FOUND_FINGERPRINT] == signed
    assert seconds < 30, "the deadline was a minute away"


def test_a_notice_of_a_later_step_leaves_the_wait_alone(device):
    told = Notice(Reason.FAILED, 2, 0, 2 * 8 + Word.READY)
    record, _, _ = wait(Word.ARRIVED, 8, told.packed(), deadline_ns=200 * 10**6)
    assert record[Record.CODE] == Failure.DEADLINE


@pytest.mark.parametrize("epoch", [1, 2**63 - 1])
@pytest.mark.parametrize("tile", FA3)
def test_a_notice_ends_the_wait_of_fa3(fa3, tile, epoch):
    told = Notice(Reason.FAILED, 2, 0, 2 * epoch + Word.READY)
    signed = told.packed() - (1 << 64) if told.packed() >> 63 else told.packed()
    record, blocks, seconds = wait(Word.READY, epoch, signed, fa3=tile)
    assert record == [Failure.TOLD, Word.READY, 0, 1, epoch, 0, 0, signed]
    assert [block[READY] for block in blocks] == [epoch] * 3, "it publishes before it waits"
    assert seconds < 30, "the deadline was a minute away"


@pytest.mark.parametrize("tile", FA3)
def test_fa3_waits_on_after_a_notice_of_the_next_step_and_tells_of_its_own_deadline(fa3, tile):
    told = Notice(Reason.FAILED, 2, 0, 2 * 9 + Word.ARRIVED)
    record, blocks, _ = wait(Word.READY, 8, told.packed(), deadline_ns=200 * 10**6, fa3=tile)
    assert record == [Failure.DEADLINE, Word.READY, 0, 1, 8, 0, 0, 0]
    for block in blocks:
        assert Notice.unpacked(block[TOLD]) == Notice(Reason.MISSED, 0, 1, 2 * 8 + Word.READY + 1)


@pytest.mark.parametrize(
    ("word", "attention"), [(Word.ARRIVED, 0), (Word.READY, 0), (Word.READY, 128), (Word.READY, 64)]
)
def test_a_deadline_is_told_to_every_peer(device, word, attention):
    """Also by a warp of the attention kernel, which has given most of its registers back."""
    record, blocks, _ = wait(word, 8, deadline_ns=50 * 10**6, attention=attention)
    assert (record[Record.CODE], record[Record.PEER], record[Record.FOUND_FINGERPRINT]) == (Failure.DEADLINE, 1, 0)
    for block in blocks:
        notice = Notice.unpacked(block[TOLD])
        assert (notice.reason, notice.rank, notice.missing) == (Reason.MISSED, 0, 1)
        # rank 0 has published this step itself: it is the next one that will not come
        assert notice.step == 2 * 8 + word + 1


_OVERLAPPED = """
import json, os, sys, torch
sys.path[:0] = [{root!r}, {root!r} + "/cute", {root!r} + "/tests/gpu"]
from test_overlap import EPOCH_BEFORE, Rank, kernels
from fa4_a2a.signal import ARRIVED, FINGERPRINT
case = Rank(torch.device("cuda"), kernels("sm_90a")[1], 3, 300, 2, 0)
case.blocks[0, FINGERPRINT + 2] = {other}
case.blocks[0, ARRIVED + 2] = EPOCH_BEFORE + 1
torch.cuda.synchronize()
case.run(num_sms=1)  # its first tile is of rank 1's queries
try:
    torch.cuda.synchronize()
except Exception:
    pass
print(json.dumps(case.record.tolist()), flush=True)
os._exit(0)
"""


def test_another_call_of_one_rank_ends_the_wait_for_another_rank(arch):
    """Rank 0 waits for rank 1, which ended over rank 2's configuration before it had sent anything."""
    from test_overlap import EPOCH_BEFORE, MARK

    program = _OVERLAPPED.format(root=str(ROOT), other=MARK + 1)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    assert record[Record.CODE : Record.EXPECTED_EPOCH + 1] == [Failure.FINGERPRINT, 0, 0, 2, EPOCH_BEFORE + 1]
    assert record[Record.EXPECTED_FINGERPRINT :] == [MARK, MARK + 1]
