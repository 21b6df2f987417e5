"""Tests that the control server survives any behaviour of its callers, and ends on request."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from support.served_sockets import FakeOperations, served
from support.until import until

from ciuic.errors import Busy, Unreachable
from ciuic.protocol import http_server
from ciuic.protocol.control import ControlClient
from ciuic.protocol.peer_socket import Caller

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
    # The server may have closed this connection already.
    with suppress(BrokenPipeError):
        caller.sendall(data)
    return caller


def _failing_once(error: Exception, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``real`` with a first call that raises ``error``."""
    left = [error]

    async def call(*arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if left:
            raise left.pop()
        return await real(*arguments)

    return call


def test_callers_that_disconnect_end_only_their_connection(short_tmp: Path) -> None:
    """Four hundred callers that disconnect in mid-body, some half-closed, leave the server answering."""
    path = short_tmp / "c.sock"
    with capture_logs() as logs, served(path, FakeOperations()), ControlClient(path) as client:
        for number in range(400):
            caller = _call(path, _UNFINISHED[number % len(_UNFINISHED)])
            if number % 3 == 0:
                caller.shutdown(socket.SHUT_WR)
            caller.close()
        assert client.status().pid == 2
    assert [one for one in logs if one["log_level"] != "debug"] == []


def _ask(caller: socket.socket) -> int:
    """Return the status of the answer to a request on an open connection."""
    caller.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
    with HTTPResponse(caller) as answer:
        answer.begin()
        answer.read()
        return answer.status


def test_requests_on_one_connection_are_answered_in_order(short_tmp: Path) -> None:
    """Requests that arrive together are answered one after the other; HEAD gets a head, and nonsense a refusal."""
    path = short_tmp / "c.sock"
    asked = (b"HEAD /v1/status", b"GET /metrics", b"HEAD /nothing", b"GET /%2e%2e/v1/status")
    requests = b"".join(b"%b HTTP/1.1\r\nHost: x\r\n\r\n" % one for one in asked) + b"nonsense\r\n\r\n"
    with served(path, FakeOperations()), _call(path, requests) as caller:
        statuses = []
        with caller.makefile("rb") as answers:
            for method in ("HEAD", "GET", "HEAD", "GET", "GET"):
                statuses.append(int(answers.readline().split()[1]))
                length = 0
                while (line := answers.readline().strip().lower()) != b"":
                    if line.startswith(b"content-length:"):
                        length = int(line.split()[1])
                body = b"" if method == "HEAD" else answers.read(length)
                assert length > 0
            assert b"not HTTP" in body
            assert answers.read() == b""
    assert statuses == [200, 200, 404, 404, 400]


def test_a_listener_that_hangs_up_is_forgotten(short_tmp: Path) -> None:
    """The subscription of a caller that has gone ends although no event comes, and a wait of one too."""
    operations, path = FakeOperations(), short_tmp / "c.sock"
    ended: list[str] = []

    async def snapshot_state(snapshot_id: str, *, wait: bool) -> Any:
        operations.calls.append(("waits",))
        try:
            await trio.sleep_forever()
        finally:
            ended.append(snapshot_id)

    operations.snapshot_state = snapshot_state  # type: ignore[method-assign]
    with served(path, operations):
        callers = [
            _call(path, b"GET /v1/%b HTTP/1.1\r\nHost: x\r\n\r\n" % target)
            for target in (b"events", b"snapshots/cs-111111?wait=1")
        ]
        assert callers[0].recv(1) == b"H"
        until("the wait", lambda: operations.calls)
        for caller in callers:
            caller.close()
        until("their ends", lambda: ended and not operations.events._subscriptions)
    assert ended == ["cs-111111"]


@pytest.mark.parametrize("is_root", [True, False])
def test_a_connection_from_before_a_revocation_takes_no_request(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, is_root: bool
) -> None:
    """After the socket was taken back from a group, open connections take no request, except those of root."""
    path, revoked = short_tmp / "c.sock", [0]
    monkeypatch.setattr(http_server, "caller_of", lambda peer: Caller(0 if is_root else 1000, frozenset()))
    with served(path, FakeOperations(), revocations=lambda: revoked[0]), _call(path) as before:
        assert _ask(before) == 200
        revoked[0] += 1
        assert _ask(before) == (200 if is_root else 403)
        with _call(path) as after:
            assert _ask(after) == 200


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
    """An error in one connection ends it without an answer and is logged unless the caller caused it.

    The next connection is served.
    """
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


def test_caller_beyond_the_limit_gets_busy(short_tmp: Path) -> None:
    """A caller gets Busy at once with every slot taken, and is served when another has disconnected."""
    path = short_tmp / "c.sock"
    with served(path, FakeOperations(), max_connections=8), ControlClient(path) as client:
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

        until("a free place", is_answered)


def test_caller_that_does_not_read_does_not_delay_the_end(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that its caller does not read is given up when the daemon ends."""

    class Talkative(FakeOperations):
        async def metrics(self) -> bytes:
            await trio.lowlevel.checkpoint()
            return b"ciuic_up 1\n" * 10**6

    monkeypatch.setattr(http_server, "GRACEFUL_SECONDS", 0.1)
    path = short_tmp / "c.sock"
    # When it ends, the server expects its thread to end.
    with served(path, Talkative()):
        caller = _call(path, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert caller.recv(1) == b"H"
    with caller, ControlClient(path) as client, pytest.raises(Unreachable):
        client.status()
