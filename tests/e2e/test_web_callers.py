"""Callers of the process that faces browsers who do not read their answers."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ciuic.cli.commands.web.jobs import FrontJob
from ciuic.system.child_process import environment

_PROGRAM = """
import sys
from ciuic.cli.commands.web import front_process
front_process._SEND_SECONDS = float(sys.argv[1])
sys.exit(front_process.main())
"""
_REQUEST = b"GET /static/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
_REQUESTS = 1000
"""More answers than the buffers of a socket take."""


def _front(directory: Path, send_seconds: float) -> Iterator[Path]:
    """Yield the socket of a front that waits as long for its callers."""
    path = directory / "front.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        job = FrontJob(
            sockets=(listener.fileno(),),
            broker=os.fspath(directory / "no-broker"),
            repository=os.fspath(directory / "no-repository"),
            host="here",
        )
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(send_seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=job.sockets, env=environment(), cwd="/",
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        yield path
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture
def impatient(short_tmp: Path) -> Iterator[Path]:
    """Provide the socket of a front that waits for half a second."""
    yield from _front(short_tmp, 0.5)


def _connected(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(60)
    made.connect(os.fspath(path))
    return made


def test_a_caller_that_takes_nothing_is_disconnected(impatient: Path) -> None:
    """Its connection ends before it has read anything, and others are answered; one that takes all it is sent gets all."""
    with _connected(impatient) as stalled:
        stalled.sendall(_REQUEST * _REQUESTS)
        hung_up = select.poll()
        hung_up.register(stalled, 0)
        # What it has not read does not matter: the end of the connection itself is awaited.
        assert hung_up.poll(60_000) == [(stalled.fileno(), select.POLLHUP)]
        with _connected(impatient) as other:
            other.sendall(
                _REQUEST * (_REQUESTS - 1) + _REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            )
            answers = b"".join(iter(lambda: other.recv(1 << 16), b""))
        assert answers.count(b"HTTP/1.1 200") == _REQUESTS
        got = b"".join(iter(lambda: stalled.recv(1 << 16), b""))
        assert 0 < got.count(b"HTTP/1.1 200") < _REQUESTS
