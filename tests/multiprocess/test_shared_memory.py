"""What the workspace holds: growth, files in shared memory, what stays after close."""

import contextlib
import os
import re
import resource
import stat
import time
from pathlib import Path

import pytest
import torch
from workers import attempt, forget, inputs, works

import fa_a2a
from fa_a2a import UlyssesAttention
from fa_a2a.comm import pointer, shared_memory
from fa_a2a.comm.group import resolve
from fa_a2a.comm.shared_memory import SharedMemory
from fa_a2a.layout import SIGNAL_BYTES, ExchangeShape, WorkspaceMap


def segments():
    return sorted(Path("/dev/shm").glob("fa_a2a-*")) if os.path.isdir("/dev/shm") else []


def mapped():
    """Blocks of the library that this process has mapped: its own and its peers'."""
    return sum("memfd:fa_a2a" in line for line in Path("/proc/self/maps").read_text().splitlines())


def many_lengths(rank, size):
    fa_a2a.close()
    layer = UlyssesAttention(kernel="cpu", exchange="fused")
    held, largest = [], 0
    for i in range(64):
        rows = 1 + (i * 29) % 64  # every length from 1 to 64, up and down
        layer(*inputs(rank, size, rows=rows, heads=size, dim=8))
        largest = max(largest, rows)
        held.append((largest, sum(fa_a2a.memory_bytes().values())))
    return held, mapped(), len(resolve(None).plans)


@pytest.mark.parametrize("size", [2, 8])
def test_case_09_many_lengths_bound_the_workspace_by_the_largest(ranks, size):
    for held, maps, plans in ranks(size).run(many_lengths):
        for largest, nbytes in held:
            need = WorkspaceMap().grown(ExchangeShape(1, largest * size, size, 8, size, 4)).total_bytes
            assert nbytes == need + SIGNAL_BYTES
        assert plans == 64
        assert maps == 2 * size  # two blocks of each rank: outgrown ones are unmapped


def held_by_the_process():
    return len(os.listdir("/proc/self/fd")), mapped(), len(pointer._alive)


def cycles(rank, size):
    store = torch.distributed.distributed_c10d._get_default_store()
    found = []
    for cycle in range(24):
        works(rank, size)
        for rows in (3, 9):
            UlyssesAttention(kernel="cpu", exchange="fused")(*inputs(rank, size, rows=rows + cycle))
        fa_a2a.close()
        torch.distributed.barrier()
        found.append((*held_by_the_process(), store.num_keys()))
        torch.distributed.barrier()
    return found[3], found[-1]


def test_closing_and_opening_again_holds_on_to_nothing(ranks):
    for early, late in ranks(2).run(cycles):
        assert early[:3] == late[:3]
        assert early[1] == 0
        assert late[3] <= early[3] + 2


def shared(rank, size):
    """While rank 1 has yet to map rank 0's block: what another process sees of it. Then the name it had, if any."""
    fa_a2a.close()
    group = resolve(None)
    memory = SharedMemory(group, 10.0)
    found, name, real = None, "", group.exchange

    def exchange(topic, value, *rest):
        nonlocal found, name
        told = real(topic, value, *rest)
        if topic == "shared memory" and rank == 1:
            name, (device, inode), _ = told[0]
            status = os.stat(name)
            link = os.readlink(name) if os.path.islink(name) else name
            found = link, stat.S_IMODE(status.st_mode), (status.st_dev, status.st_ino) == (device, inode)
        return told

    group.exchange = exchange
    try:
        block = memory.allocate(4096, 10.0)
    finally:
        del group.exchange
    group.barrier("mapped", 10.0)
    return found, mapped(), block.nbytes, [int(p.sum()) for p in block.peers], os.path.exists(name)


def test_blocks_are_private_zeroed_and_never_have_a_name(ranks):
    (_, *first), (found, *second) = ranks(2).run(shared)
    ranks(2).run(forget)
    assert found == ("/memfd:fa_a2a (deleted)", 0o600, True)
    assert first[:3] == second[:3] == [2, 4096, [0, 0]]


def replaced(rank, size):
    """Rank 1's file is another one by the time the others open it, as after the end of a process."""
    fa_a2a.close()
    group, real = resolve(None), shared_memory._identity
    if rank == 1:
        shared_memory._identity = lambda fd: [real(fd)[0], real(fd)[1] + 1]
    try:
        outcome = attempt(SharedMemory(group, 10.0).allocate, 4096, 10.0)
    finally:
        shared_memory._identity = real
    fa_a2a.close()
    return outcome, works(rank, size)


def test_a_file_that_is_not_the_one_told_of_is_refused(ranks):
    for outcome, well in ranks(2).run(replaced):
        assert outcome.error == "UnsupportedError"
        assert "another file by now" in outcome.text
        assert well


def named(rank, size):
    """As on systems without files that have no name."""
    del os.memfd_create
    return shared(rank, size), works(rank, size)


def test_where_a_name_is_needed_it_is_random_private_and_gone_once_mapped(fresh_ranks):
    (_, well), ((found, _, nbytes, sums, exists), well_too) = fresh_ranks(2).run(named)
    name, mode, same = found
    assert re.fullmatch(r"/dev/shm/fa_a2a-[0-9a-f]{32}", name)
    assert (mode, same, nbytes, sums, exists) == (0o600, True, 4096, [0, 0], False)
    assert well
    assert well_too


def names_during_use(rank, size):
    found = []
    for rows in (3, 40, 90):
        UlyssesAttention(kernel="cpu", exchange="fused")(*inputs(rank, size, rows=rows))
        resolve(None).barrier("look", 10.0)
        found += segments()
        resolve(None).barrier("looked", 10.0)
    return [str(path) for path in found]


def test_no_name_stays_in_shared_memory_during_use_and_after(ranks):
    assert ranks(2).run(names_during_use) == [[], []]
    assert segments() == []


def no_room(rank, size):
    """Rank 1 may not make files beyond 64 KiB for a while: the workspace cannot grow, and small calls go on."""
    fa_a2a.close()
    assert works(rank, size)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16 if rank == 1 else soft, hard))
    try:
        layer = UlyssesAttention(kernel="cpu", exchange="fused")
        outcomes = [attempt(layer, *inputs(rank, size, rows=400)) for _ in range(2)]
        small = works(rank, size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return outcomes, small, attempt(layer, *inputs(rank, size, rows=400)).error, works(rank, size)


def test_no_room_to_grow_is_one_error_and_the_calls_that_fit_go_on(ranks):
    for outcomes, small, later, well in ranks(2).run(no_room):
        for outcome in outcomes:
            assert outcome.error == "WorkspaceError"
            assert "rank 1: [Errno 27]" in outcome.text
            assert "this process's limits" in outcome.text
            assert outcome.seconds < 5
        assert small
        assert later == ""
        assert well
    assert segments() == []


def interrupted(rank, size, where):
    """Ctrl-C reaches rank 1 at a step of growth that is no wait."""
    fa_a2a.close()
    layer = UlyssesAttention(kernel="cpu", exchange="fused", timeout_s=20)
    layer(*inputs(rank, size))
    real, end = getattr(shared_memory, where), ""
    if rank:

        def interrupt(*_):
            raise KeyboardInterrupt

        setattr(shared_memory, where, interrupt)
    start = time.monotonic()
    try:
        layer(*inputs(rank, size, rows=400))
    except (KeyboardInterrupt, fa_a2a.errors.PeerTimeoutError) as error:
        end = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    setattr(shared_memory, where, real)
    after = attempt(layer, *inputs(rank, size))
    fa_a2a.close()
    return end, seconds, after, works(rank, size)


@pytest.mark.parametrize("where", ["_create", "_reserve", "_open"])
def test_an_interrupted_growth_is_told_to_the_peers(ranks, where):
    results = ranks(2).run(interrupted, where=where)
    assert [end for end, *_ in results] == [
        "PeerTimeoutError: rank 1 gave up: KeyboardInterrupt",
        "KeyboardInterrupt: ",
    ]
    for _, seconds, after, well in results:
        assert seconds < 5
        assert after.error == "WorkspaceError" and "fa_a2a.close(group)" in after.text
        assert well


def no_file(rank, size):
    """Rank 1 may open no further file."""
    fa_a2a.close()
    layer = UlyssesAttention(kernel="cpu", exchange="fused", timeout_s=20)
    layer(*inputs(rank, size))
    held = resolve(None).workspace.block  # whose mappings hold files, too
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
        outcome = attempt(layer, *inputs(rank, size, rows=400))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    assert held.nbytes > 0
    return outcome, attempt(layer, *inputs(rank, size)).error, works(rank, size)


def test_no_file_to_be_had_is_one_error(ranks):
    for outcome, after, well in ranks(2).run(no_file):
        assert outcome.error == "WorkspaceError" and "rank 1: [Errno 24]" in outcome.text
        assert outcome.seconds < 5 and after == "" and well
