"""How two processes hand each other memory (bench/slots.py): the sockets, which need no GPU."""

import os
import socket
import threading

import pytest

from fa_a2a.bench.slots import _door, _swap


def file_of(text):
    descriptor = os.memfd_create("memory")
    os.write(descriptor, text)
    return descriptor


def test_each_gets_what_the_other_has():
    mine, theirs, got = file_of(b"mine"), file_of(b"theirs"), []
    with _door(10.0) as one, _door(10.0) as other:
        thread = threading.Thread(target=lambda: got.append(_swap(theirs, other, one.getsockname())))
        thread.start()
        got.append(_swap(mine, one, other.getsockname()))
        thread.join(10)
    assert {os.pread(descriptor, 10, 0) for descriptor in got} == {b"mine", b"theirs"}
    for descriptor in (mine, theirs, *got):
        os.close(descriptor)


def test_one_that_does_not_come_is_an_error_before_the_group_gives_up():
    mine = file_of(b"mine")
    with _door(0.3) as one, _door(0.3) as other:
        assert one.gettimeout() < 0.3
        with pytest.raises(OSError, match="timed out"):
            _swap(mine, one, other.getsockname())
    os.close(mine)


def test_one_that_hands_nothing_over_is_an_error():
    mine = file_of(b"mine")
    with _door(10.0) as one, _door(10.0) as other:
        with socket.socket(socket.AF_UNIX) as way:
            way.connect(one.getsockname())
        with pytest.raises(OSError, match="handed no memory over"):
            _swap(mine, one, other.getsockname())
    os.close(mine)
