"""The control API over a real socket: every call and every refusal, as the client sees it."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import trio
from support.served_sockets import FakeOperations, served

from ciuic import __version__
from ciuic.errors import BY_EXIT_CODE, CiuicError, Damaged, NotFound, NotPermitted, Unreachable, UsageError
from ciuic.protocol import http_server
from ciuic.protocol.control import ControlClient
from ciuic.protocol.control_types import HoldRequest, Index, SnapshotRequest
from ciuic.protocol.http_server import MAX_BODY_BYTES
from ciuic.protocol.socket_http import Connection
from ciuic.types import SetMember


@pytest.fixture
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
def client(short_tmp: Path, operations: FakeOperations) -> Iterator[ControlClient]:
    with served(short_tmp / "c.sock", operations), ControlClient(short_tmp / "c.sock") as made:
        yield made


def test_every_call_arrives_and_is_answered(client: ControlClient, operations: FakeOperations) -> None:
    """Each method of the client reaches its operation with its arguments and returns its document."""
    assert client.status().roots[0].path == "/ä b"
    assert client.take_snapshot(message="m", tags=["a"], hold=True, roots=["/r"]).state == "pending"
    assert client.take_snapshot(wait=True).state == "committed"
    assert client.snapshot_state("cs-1").state == "committed"
    assert client.wait_snapshot("cs-2").id == "cs-2"
    assert client.flush(["/r"]).complete
    member = SetMember(id="ab" * 16, name="n", member="a", members=("a", "b"))
    held = HoldRequest(snapshot=SnapshotRequest(message="m"), set_member=member, limit_seconds=2.0)
    token = client.hold(held).token
    assert client.cut_hold(token).id == "cs-123456"
    client.release_hold(token)
    assert client.add_root("/r").state == "mounted"
    client.remove_root("/r")
    assert client.prune(dry_run=True).removed == ["cs-000001"]
    client.forget_trainer("t")
    assert client.reload().config_path == "/c.toml"
    client.stop()
    assert client.metrics() == "ciuic_up 1\n"
    assert operations.calls == [
        ("status",),
        ("take_snapshot", SnapshotRequest(message="m", tags=["a"], hold=True, roots=["/r"])),
        ("take_snapshot", SnapshotRequest(wait=True)),
        ("snapshot_state", "cs-123456", True),
        ("snapshot_state", "cs-1", False),
        ("snapshot_state", "cs-2", True),
        ("flush", ["/r"]),
        ("hold", held),
        ("decide_hold", "a1", True),
        ("decide_hold", "a1", False),
        ("add_root", "/r"),
        ("remove_root", "/r"),
        ("prune", True),
        ("forget_trainer", "t"),
        ("reload",),
        ("stop",),
        ("metrics",),
    ]


@pytest.mark.parametrize("code", sorted(BY_EXIT_CODE))
def test_every_error_arrives_as_itself(client: ControlClient, operations: FakeOperations, code: int) -> None:
    """Class, exit code, message and hint of an error survive the transfer over HTTP."""
    operations.failure = BY_EXIT_CODE[code]("what: ünd", hint="do")
    with pytest.raises(CiuicError) as caught:
        client.status()
    assert (type(caught.value), caught.value.message, caught.value.hint) == (
        BY_EXIT_CODE[code],
        "what: ünd",
        "do",
    )


def test_an_unexpected_exception_is_not_disclosed(client: ControlClient, operations: FakeOperations) -> None:
    """An unexpected exception is answered with "internal error", not with its text."""
    operations.failure = ZeroDivisionError("secret")
    with pytest.raises(CiuicError, match="internal error") as caught:
        client.status()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"path": 3}',
        b'{"pth": "/a"}',
        b"{}",
        b'{"path": "/' + b"a" * MAX_BODY_BYTES + b'"}',
        b'{"path": "\xff"}',
        b'{"\xff": 1}',
        b"\xff\xfe",
        b'{"path": ' + b"[" * 30_000,
        b"[" * 30_000,
    ],
)
def test_requests_that_cannot_be_meant_are_refused(
    client: ControlClient, operations: FakeOperations, body: bytes
) -> None:
    """Malformed, mistyped, unknown, missing and oversized bodies are wrong usage, and nothing is done."""
    with Connection(str(client.socket), connect_seconds=5) as connection:
        answer = connection.ask("POST", "/v1/roots", body, answer_seconds=30)
    assert answer.status == 400
    assert msgspec.json.decode(answer.body)["code"] == UsageError.exit_code
    assert operations.calls == []


def test_a_body_that_never_ends_is_given_up(
    client: ControlClient, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that stops in mid-request is refused and disconnected, so its slot is free again."""
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(client.socket))
        caller.sendall(b"POST /v1/roots HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{")
        answer = b"".join(iter(lambda: caller.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"did not arrive" in answer
    assert operations.calls == []


def test_unknown_resources_and_methods_are_answered_as_documents(client: ControlClient) -> None:
    """An unknown resource or method, of another version say, is answered with a document."""
    with pytest.raises(UsageError, match="/v1/nothing"):
        client._request("GET", "/v1/nothing")
    with pytest.raises(UsageError, match="DELETE"):
        client._request("DELETE", "/v1/status")


@pytest.mark.parametrize("path", ["/", "/v1"])
def test_top_resource_lists_all_others(client: ControlClient, path: str) -> None:
    """`GET /` lists version and every resource, so that a person with curl can find them."""
    with Connection(str(client.socket), connect_seconds=5) as connection:
        answer = connection.ask("GET", path, answer_seconds=5)
    index = msgspec.json.decode(answer.body, type=Index)
    assert (answer.status, index.name, index.version) == (200, "ciuic", __version__)
    found = {(resource.method, resource.path) for resource in index.resources}
    assert {
        ("GET", "/v1/status"),
        ("POST", "/v1/snapshots"),
        ("DELETE", "/v1/roots"),
        ("GET", "/metrics"),
    } <= found


def test_events_arrive_until_the_bus_closes(short_tmp: Path, operations: FakeOperations) -> None:
    """A listener gets the events since it began to listen, in order, until the daemon ends."""
    with served(short_tmp / "c.sock", operations) as in_loop, ControlClient(short_tmp / "c.sock") as client:

        def emit_when_listening() -> None:
            if not operations.events._subscriptions:
                trio.lowlevel.current_trio_token().run_sync_soon(emit_when_listening)
                return
            for number in range(3):
                operations.events.emit("root_state", root="/a", detail=str(number))
            operations.events.close()

        in_loop(emit_when_listening)
        kinds = [(event.kind, event.root, event.detail) for event in client.events()]
    assert kinds == [("root_state", "/a", "0"), ("root_state", "/a", "1"), ("root_state", "/a", "2")]


def test_missing_listener_is_unreachable(short_tmp: Path) -> None:
    """A missing socket and one without a listener exit with 5 and say what to do."""
    with ControlClient(short_tmp / "none") as client, pytest.raises(Unreachable) as caught:
        client.status()
    assert "ciuic daemon" in caught.value.hint
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_tmp / "dead"))
    with ControlClient(short_tmp / "dead") as client:
        assert not client.is_running()


def test_a_daemon_that_goes_away_in_the_middle_is_unreachable(short_tmp: Path) -> None:
    """A connection that ends without an answer is reported as unreachable daemon, not as success."""
    path = short_tmp / "c.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(10)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with ControlClient(path) as client, pytest.raises(Unreachable, match="did not answer"):
            client.status()
        thread.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_socket_that_may_not_be_opened_is_not_permitted(
    short_tmp: Path, operations: FakeOperations
) -> None:
    """A user without permission to connect gets exit code 7 and a message that names the group."""
    path = short_tmp / "c.sock"
    os.chmod(short_tmp, 0o755)
    os.chmod(short_tmp.parent, 0o755)
    with served(path, operations):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        pid = os.fork()
        if pid == 0:
            os.setgid(65534)
            os.setuid(65534)
            try:
                ControlClient(path).status()
            except NotPermitted as error:
                os._exit(7 if "group" in error.hint else 1)
            except BaseException:
                os._exit(2)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_exit_codes_are_fixed() -> None:
    """Exit codes keep their numbers in the table of errors."""
    assert (Damaged.exit_code, NotFound.exit_code, Unreachable.exit_code) == (4, 3, 5)
