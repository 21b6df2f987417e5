"""Whatever callers of the control socket do, the daemon serves on, and ends when it is told to."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from support.live import wait_for
from support.served_api import FakeOperations, served

from ciuic.control import ControlClient
from ciuic.daemon import server
from ciuic.errors import Busy, Unreachable

_UNFINISHED = (
    b"POST /v1/roots HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{",
    b"POST /v1/roots HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\nGET",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 30,
)


def _call(path: Path, data: bytes = b"") -> socket.socket:
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(str(path))
    caller.settimeout(30)
    with suppress(BrokenPipeError):  # hung up on already
        caller.sendall(data)
    return caller


def _failing_once(error: Exception, real: Callable[..., Any]) -> Callable[..., Any]:
    """Like ``real``, but the first call raises ``error``."""
    left = [error]

    async def call(*arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if left:
            raise left.pop()
        return await real(*arguments)

    return call


def test_callers_who_hang_up_in_the_middle_end_only_their_connection(short_tmp: Path) -> None:
    """Four hundred callers leave in mid-body, some having said that they will send no more: the next one is answered."""
    path = short_tmp / "c.sock"
    with capture_logs() as logs, served(path, FakeOperations()), ControlClient(path) as client:
        for number in range(400):
            caller = _call(path, _UNFINISHED[number % len(_UNFINISHED)])
            if number % 3 == 0:
                caller.shutdown(socket.SHUT_WR)
            caller.close()
        assert client.status().pid == 2
    assert [one for one in logs if one["log_level"] != "debug"] == []


@pytest.mark.parametrize("method", ["send_all", "receive_some"])
@pytest.mark.parametrize(
    ("error", "is_ours"),
    [
        (trio.BusyResourceError("another task is sending"), False),
        (RuntimeError("a mistake of ours"), True),
        (MemoryError(), True),
    ],
)
def test_an_error_of_one_connection_is_noted_and_ends_that_connection(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, is_ours: bool
) -> None:
    """Its caller gets no answer; the next one does. What is not the caller's doing is an error in the log."""
    path = short_tmp / "c.sock"
    with capture_logs() as logs, served(path, FakeOperations()):
        monkeypatch.setattr(
            trio.SocketStream, method, _failing_once(error, getattr(trio.SocketStream, method))
        )
        request = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"
        with _call(path, request) as caller, suppress(ConnectionResetError):
            assert caller.recv(1) == b""
        with ControlClient(path) as client:
            assert client.status().pid == 2
    assert [one["event"] for one in logs if one["log_level"] != "debug"] == ["connection_failed"] * is_ours


def test_one_caller_too_many_is_told_so_and_served_when_another_leaves(short_tmp: Path) -> None:
    """With every place taken a command ends with Busy, at once; when somebody has left it is served."""
    path = short_tmp / "c.sock"
    with served(path, FakeOperations(), most_connections=8), ControlClient(path) as client:
        crowd = [_call(path, b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(8)]
        assert all(caller.recv(1) == b"H" for caller in crowd)
        for _ in range(3):
            with pytest.raises(Busy, match="too many callers"):
                client.status()
        for caller in crowd:
            caller.close()

        def is_answered() -> bool:
            try:
                return client.status().pid == 2
            except Busy:
                return False

        wait_for("a free place", is_answered, 30)


def test_a_caller_who_does_not_read_does_not_keep_the_daemon_from_ending(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that nobody takes is given up at the end."""

    class Talkative(FakeOperations):
        async def metrics(self) -> bytes:
            await trio.lowlevel.checkpoint()
            return b"ciuic_up 1\n" * 10**6

    monkeypatch.setattr(server, "GRACEFUL_SECONDS", 0.1)
    path = short_tmp / "c.sock"
    with served(path, Talkative()):  # at its end it expects the server's thread to end
        caller = _call(path, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert caller.recv(1) == b"H"
    with caller, ControlClient(path) as client, pytest.raises(Unreachable):
        client.status()
