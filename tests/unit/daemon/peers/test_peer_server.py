"""Tests of the daemon's side of a receiver: what fails with one message costs nothing but its connection."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from msgspec import msgpack

from ciuic.daemon import peer_receiver
from ciuic.daemon import peer_server as server_module
from ciuic.daemon.base import child_processes
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.peer_messages import (
    MAX_MESSAGE_BYTES,
    Admit,
    AnswerCaller,
    Arrived,
    Beat,
    FromDaemon,
    Hung,
    KnownUsers,
    Ready,
    ReceiverOptions,
    Said,
)
from ciuic.daemon.peer_server import PeerQuestion, PeerReply, PeerServer, _Conversation
from ciuic.daemon.roots.permission import owners
from ciuic.protocol import pairing
from ciuic.protocol.peer_socket import Caller
from ciuic.structs import decode_msgpack

OPTIONS = ReceiverOptions(
    path="/run/x.sock", max_message_bytes=1024, max_connections=8, max_connections_of_a_user=8
)


def _no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Conversed:
    """A conversation with a receiver that the test plays."""

    def __init__(self, **callbacks: Callable[..., object]) -> None:
        async def answer(question: PeerQuestion) -> PeerReply:
            return PeerReply(question.data.upper())

        self.alerts = Alerts(EventBus(lambda: 0), lambda: 0)
        self.server = PeerServer(OPTIONS, answer, alerts=self.alerts, **callbacks)  # type: ignore[arg-type]

    def process_messages(self, *messages: bytes, fds: tuple[int, ...] = ()) -> list[object]:
        """Return what the daemon says to these messages of a receiver; the first one comes with `fds`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        said: list[object] = []

        async def main() -> None:
            channel = trio.socket.from_stdlib_socket(ours)
            peer = trio.socket.from_stdlib_socket(theirs)
            async with trio.open_nursery() as nursery:
                self.server._nursery = nursery
                nursery.start_soon(_Conversation(self.server, channel, os.getpid()).hold)
                for index, message in enumerate((*messages, msgpack.encode(_said(b"last")))):
                    socket.send_fds(theirs, [message], list(fds) if index == 0 else [])
                while not said or said[-1] != AnswerCaller(99, b"LAST"):
                    said.append(decode_msgpack(await peer.recv(MAX_MESSAGE_BYTES), FromDaemon))
                peer.close()
                await trio.testing.wait_all_tasks_blocked()
                self.standing = [alert.key for alert in self.alerts.standing()]
                nursery.cancel_scope.cancel()
            channel.close()

        trio.run(main)
        return said[:-1]


def _said(data: bytes) -> Said:
    return Said(number=99, uid=5, groups=(5,), data=data)


def test_messages_that_cannot_be_handled_cost_their_connections() -> None:
    """Without descriptors left, callers are not admitted, and the conversation with the receiver goes on."""
    conversed = Conversed(admit=_no_descriptor, known=_no_descriptor)
    assert (
        conversed.process_messages(
            msgpack.encode(Ready()), msgpack.encode(Arrived(1, 5, (5,))), msgpack.encode(Beat(1))
        )
        == []
    )
    assert conversed.server.ready.is_set()


@pytest.mark.parametrize(
    "garbage", [b"\xc1", b"x", b"\x81\xa4type\xa2\xff\xff", b"\x91" * 60000, msgpack.encode(Admit(1))]
)
def test_a_message_that_cannot_be_decoded_costs_itself(garbage: bytes) -> None:
    """Descriptors of such a message are closed, and the next message is handled."""
    conversed = Conversed(known=lambda: [7])
    read_end, write_end = os.pipe()
    assert conversed.process_messages(garbage, msgpack.encode(Beat(1)), fds=(write_end,)) == [
        KnownUsers((7,))
    ]
    os.close(write_end)
    # The end of the pipe, because no process has its other end open.
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_a_hung_helper_is_an_alert_even_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alert stands while the helper lives, also where no pidfd of it could be opened."""
    monkeypatch.setattr(server_module.os, "pidfd_open", _no_descriptor)
    conversed = Conversed()
    conversed.process_messages(msgpack.encode(Hung(5, os.getpid())))
    assert conversed.standing == ["socket:x.sock:5"]
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    conversed = Conversed()
    conversed.process_messages(msgpack.encode(Hung(5, gone)))
    assert conversed.standing == []


def test_an_error_in_a_nursery_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that fails in an unforeseen way is replaced, and an alert says so."""
    server = Conversed().server
    runs = []

    async def fail() -> None:
        raise OSError(errno.EIO, "x")

    async def run_one() -> None:
        runs.append(1)
        if len(runs) == 3:
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as inner:
            inner.start_soon(fail)

    monkeypatch.setattr(server, "_run_one", run_one)
    monkeypatch.setattr(child_processes, "RESTART_SECONDS", (0.0,))

    async def main() -> None:
        nonlocal nursery
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve)

    nursery: trio.Nursery
    trio.run(main)
    assert len(runs) == 3
    assert [alert.key for alert in server._alerts.standing()] == ["socket:x.sock"]


def test_owners_are_known_without_a_new_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners of roots are found when no descriptor is left, and a root whose disk fails hides no other."""
    monkeypatch.setattr(os, "dup", _no_descriptor)
    here = os.open("/", os.O_PATH)
    roots = [SimpleNamespace(worker=worker) for worker in (
        None, SimpleNamespace(backing_fd=-1), SimpleNamespace(backing_fd=here)
    )]  # fmt: skip
    assert owners(roots) == frozenset({os.stat("/").st_uid})  # type: ignore[arg-type]
    os.close(here)


def test_the_groups_of_a_caller_fit_into_a_message() -> None:
    """A caller in very many groups counts as a member of none, so that its messages reach the daemon."""
    most = frozenset(range(2**31, 2**31 + peer_receiver.MAX_GROUPS))
    caller = peer_receiver.limited(Caller(5, most))
    assert caller.groups == most
    data = bytes(pairing.MAX_MESSAGE_BYTES)
    longest = Said(number=2**40, uid=2**31, groups=tuple(most), data=data, trouble="x" * 1000)
    assert len(msgpack.encode(longest)) <= MAX_MESSAGE_BYTES
    assert peer_receiver.limited(Caller(5, most | {1})) == Caller(5, frozenset())
