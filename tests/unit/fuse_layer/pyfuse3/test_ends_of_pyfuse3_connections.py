"""Tests of the portable driver's worker: which ends of the connection are clean ones."""

from __future__ import annotations

import errno
import os
import sys

import pyfuse3
import pytest
import trio

from ciuic.fuse_layer.pyfuse3_driver import serve_requests

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
