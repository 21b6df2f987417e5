"""Tests of the portable driver's connection: what is changed of libfuse's answer to FUSE_INIT, and which ends are clean ones."""

from __future__ import annotations

import errno
import os
import struct
import sys

import pyfuse3
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.pyfuse3_driver import HandshakeFailed, completed_reply, serve_requests

O_TRUNC, KILLPRIV, SYMLINKS, KILLPRIV_V2 = 1 << 3, 1 << 19, 1 << 23, 1 << 28
FLAGS = st.integers(0, 2**32 - 1)


def request(offered: int) -> bytes:
    """Return a FUSE_INIT request: header, major, minor, max_readahead, flags."""
    return struct.pack("<IIQQIIII", 56, 26, 1, 0, 0, 0, 0, 0) + struct.pack("<IIII", 7, 45, 1 << 17, offered)


def reply(flags: int, error: int = 0, rest: bytes = bytes(40)) -> bytes:
    """Return a FUSE_INIT reply of 64 bytes behind its header."""
    return (
        struct.pack("<IiQ", 80, error, 1)
        + struct.pack("<IIII", 7, 38, 1 << 17, flags)
        + b"\x0c\0\x09\0"
        + rest[:44]
    )


@given(offered=FLAGS, flags=FLAGS, rest=st.binary(min_size=44, max_size=44))
def test_only_flags_offered_by_the_kernel_are_added(offered: int, flags: int, rest: bytes) -> None:
    """Only offered flags are added; killpriv of one generation is left, and no O_TRUNC that comes with the open."""
    before = reply(flags, rest=rest)
    after = completed_reply(request(offered), before)
    (completed,) = struct.unpack_from("<I", after, 28)
    assert completed & ~flags & ~offered == 0
    assert completed & ~flags & ~(SYMLINKS | KILLPRIV_V2) == 0
    assert flags & ~completed & ~KILLPRIV == flags & O_TRUNC
    if offered & KILLPRIV_V2:
        assert completed & KILLPRIV_V2
        assert not completed & KILLPRIV
    else:
        assert completed & KILLPRIV == flags & KILLPRIV
    background, congestion = struct.unpack_from("<HH", after, 32)
    assert 0 < congestion < background
    assert (after[:28], after[36:], len(after)) == (before[:28], before[36:], len(before))


@pytest.mark.parametrize("answer", [reply(0, error=-71), reply(0)[:24]])
def test_a_refusal_is_not_passed_off_as_an_answer(answer: bytes) -> None:
    """An error or a reply of another shape ends the handshake."""
    with pytest.raises(HandshakeFailed):
        completed_reply(request(0), answer)


if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


def libfuse_fails_with(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Have each of several tasks of pyfuse3 fail with one of these errnos, in a nursery as the real ones run."""

    async def task(number: int) -> None:
        raise OSError(number, os.strerror(number))

    async def main(**_: int) -> None:
        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(task, number)

    monkeypatch.setattr(pyfuse3, "main", main)


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_request_that_the_unmount_aborts_ends_the_session_cleanly(
    monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    """The kernel answers a read with ECONNABORTED when the unmount comes while a request is handed over."""
    libfuse_fails_with(monkeypatch, *[errno.ECONNABORTED] * tasks)
    trio.run(serve_requests)


def test_other_errors_beside_an_abort_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another kind is not taken for the end of the mount, alone or beside an aborted request."""
    for numbers in [(errno.EIO,), (errno.ECONNABORTED, errno.EIO)]:
        libfuse_fails_with(monkeypatch, *numbers)
        with pytest.raises(ExceptionGroup) as raised:
            trio.run(serve_requests)
        assert raised.group_contains(OSError, match=os.strerror(errno.EIO))
