"""Many callers at once that send nothing or never finish a request: the sockets still serve all others."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.live import Live
from support.until import until

from ciuic.system.unix_sockets import connect

pytestmark = pytest.mark.mount
_HALF_REQUESTS = (
    b"",
    b"GET /v1/sta",
    b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    b"POST /v1/roots HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{",
    b"POST /v1/roots HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
)


@contextmanager
def _crowd(path: Path, count: int, *words: bytes) -> Iterator[list[socket.socket]]:
    made = []
    try:
        for number in range(count):
            sock = socket.socket(socket.AF_UNIX)
            made.append(sock)
            connect(sock, str(path), 10)
            # Refused already.
            with suppress(BrokenPipeError):
                sock.sendall(words[number % len(words)])
        yield made
    finally:
        for sock in made:
            sock.close()


def _send_more(crowd: list[socket.socket]) -> None:
    for sock in crowd[2::5]:
        # The peer has closed: no request came in five seconds.
        with suppress(BrokenPipeError):
            sock.sendall(b"a")


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_unfinished_requests_do_not_stop_the_daemon(protected: Live, root: Path) -> None:
    """Three hundred connections that never finish a request leave status, snapshot and job working.

    When they close, so do their descriptors.
    """
    assert protected.daemon is not None
    pid, control = protected.daemon.pid, protected.top / "run/control.sock"
    before = _descriptors(pid)
    with _crowd(control, 300, *_HALF_REQUESTS) as crowd:
        _send_more(crowd)
        (root / "file").write_bytes(b"the job goes on")
        assert protected.snapshot()
        _send_more(crowd)
        status = protected.status()
        assert status is not None
        assert [one["state"] for one in status["roots"]] == ["mounted"]
    until("the end of the connections", lambda: _descriptors(pid) <= before + 5)
    assert protected.snapshot()


def test_silent_callers_of_a_worker_are_turned_away(protected: Live, root: Path) -> None:
    """A worker holds some dozens of connections at most; the job works on, and snapshots work afterwards."""
    (worker,) = (protected.top / "run").glob("worker-*.sock")
    with _crowd(worker, 60, b"", b"\x05\0\0\0", b"\x05\0\0\0\x81") as crowd:
        (root / "file").write_bytes(b"the job goes on")
        turned_away = 0
        for sock in crowd:
            sock.settimeout(0.05)
            try:
                turned_away += sock.recv(1) == b""
            except ConnectionResetError:
                turned_away += 1
            except TimeoutError:
                continue
        assert turned_away >= 60 - 32
    assert protected.snapshot()
    assert (root / "file").read_bytes() == b"the job goes on"
