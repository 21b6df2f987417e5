"""Serving a socket that strangers connect to: the daemon's side of a receiver process (peer_receiver.py), kept running.

Guarantees: the daemon itself never holds a stranger's connection or descriptor, so nothing that a stranger does can block it; what goes
wrong with one caller ends that caller's connection alone; a receiver that ends or falls silent is replaced, and one that does not end
when it is killed is left behind, with an alert, while its successor serves. Belongs to the trio thread.
"""

from __future__ import annotations

import os
import socket
import subprocess
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog
import trio

from ciuic.child_process import environment, module_command
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.peer_messages import (
    MAX_MESSAGE_BYTES,
    Admit,
    Answer,
    Arrived,
    Beat,
    FromDaemon,
    FromReceiver,
    Hung,
    Known,
    Ready,
    ReceiverOptions,
    Said,
    decode_from_receiver,
    encode,
)
from ciuic.daemon.worker_process import describe_exit, mark_expendable
from ciuic.peer_socket import Caller

START_SECONDS: Final = 60.0
"""To import and to listen: a tenth of a second, and much longer on a machine that is short of everything."""
SILENT_SECONDS: Final = 20.0
"""The receiver beats once a second; it does nothing that takes longer than some milliseconds."""
END_SECONDS: Final = 2.0
BACKOFF_SECONDS: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STABLE_SECONDS: Final = 60.0
MAX_LEFT_BEHIND: Final = 4
"""Receivers that were killed and did not end. With so many the socket is not served until one of them has."""
_MAX_FDS: Final = 2
RECEIVER_COMMAND: Final = tuple(module_command("ciuic.daemon.peer_receiver"))
log = structlog.get_logger(__name__)


class Question(NamedTuple):
    """One message of a caller, as the receiver passed it on."""

    caller: Caller
    data: bytes
    fds: list[int]
    """A pidfd and pages, which the handler takes over or closes; only for a socket that takes descriptors."""
    trouble: str
    """Not empty: the message could not be received, for this reason."""


class Reply(NamedTuple):
    """``keep``: the connection stays open, by which its caller learns when there is no daemon any more."""

    data: bytes
    keep: bool = False


class PeerServer:
    """One socket. ``serve`` is its task."""

    def __init__(
        self,
        options: ReceiverOptions,
        answer: Callable[[Question], Awaitable[Reply]],
        *,
        alerts: Alerts,
        admit: Callable[[Caller], bytes] = lambda caller: b"",
        known: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """``admit`` returns what a caller is refused with, nothing for one that is heard; asked where descriptors are taken.
        ``known``: users that go first when there are too many connections.
        """
        self._options = options
        self._answer = answer
        self._alerts = alerts
        self._admit = admit
        self._known = known
        self._command = list(RECEIVER_COMMAND)
        self._name = Path(options.path).name
        self._nursery: trio.Nursery
        """Of `serve`: for waits that outlast one receiver."""
        self._hung: Counter[int] = Counter()
        """Helpers that cannot be ended, by user."""
        self._left_behind = 0
        self._one_has_ended = trio.Event()
        self.ready = trio.Event()
        """Set when the first receiver listens."""

    async def serve(self) -> None:
        """Until it is cancelled. On return no receiver of ours lives, except one that cannot be ended."""
        failures = 0
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                began = trio.current_time()
                try:
                    await self._run_one()
                except OSError as error:
                    log.error("receiver_not_started", socket=self._name, error=str(error))
                    self._report(f"no process can be started to serve it: {error}")
                failures = 1 if trio.current_time() - began >= STABLE_SECONDS else failures + 1
                await trio.sleep(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS)) - 1])
                await self._room_to_fail()

    async def _run_one(self) -> None:
        """One receiver from its start to its end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = trio.socket.from_stdlib_socket(ours)
        with channel:
            with theirs:
                process = await trio.lowlevel.open_process(
                    [*self._command, str(theirs.fileno()), msgspec.json.encode(self._options).decode()],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    cwd="/",
                    env=environment(),
                )
            try:
                mark_expendable(process.pid)
                await _Conversation(self, channel, process.pid).hold()
            finally:
                channel.close()  # it ends by itself when it reads the end
                with trio.CancelScope(shield=True):
                    await self._end(process)
        log.warning(
            "receiver_ended", socket=self._name, pid=process.pid, how=describe_exit(process.returncode)
        )

    async def _end(self, process: trio.Process) -> None:
        with trio.move_on_after(END_SECONDS):
            await process.wait()
            return
        process.kill()
        with trio.move_on_after(END_SECONDS):
            await process.wait()
            return
        log.error("receiver_left_behind", socket=self._name, pid=process.pid)
        self._report(f"its process {process.pid} hangs and was replaced")
        self._nursery.start_soon(self._await_left_behind, process)

    async def _await_left_behind(self, process: trio.Process) -> None:
        self._left_behind += 1
        await process.wait()
        self._left_behind -= 1
        self.serves()
        self._one_has_ended.set()
        self._one_has_ended = trio.Event()

    async def _room_to_fail(self) -> None:
        """Wait while so many receivers hang that one more would be too many."""
        while self._left_behind >= MAX_LEFT_BEHIND:
            await self._one_has_ended.wait()

    def _report(self, trouble: str) -> None:
        self._alerts.report(
            f"socket:{self._name}",
            f"{self._options.path} is not served as it should be: {trouble}",
            hint="see the daemon's log; ps shows processes in state D, and whose file system they wait for",
            severity="warning",
        )

    def serves(self) -> None:
        """A receiver listens."""
        self.ready.set()
        if not self._left_behind:
            self._alerts.clear(f"socket:{self._name}")

    def user_hung(self, message: Hung) -> None:
        """Alert while a helper waits for a descriptor of a user's to close."""
        try:
            pidfd = os.pidfd_open(message.pid)  # it outlives its receiver, so we look ourselves for its end
        except ProcessLookupError:
            return
        self._hung[message.uid] += 1
        self._nursery.start_soon(self._await_hung, message.uid, pidfd)
        log.error("descriptor_does_not_close", socket=self._name, uid=message.uid, pid=message.pid)
        self._alerts.report(
            f"socket:{self._name}:{message.uid}",
            f"user {message.uid} sent a descriptor to {self._options.path} that does not close: process {message.pid} waits for it",
            hint=f"user {message.uid} is refused there until that process has ended and 10 minutes more; "
            "if it is a file system of that user's, umount -f ends it",
            severity="warning",
        )

    async def _await_hung(self, uid: int, pidfd: int) -> None:
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        self._hung[uid] -= 1
        if not self._hung[uid]:
            del self._hung[uid]
            self._alerts.clear(f"socket:{self._name}:{uid}")

    def known_users(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._known())))

    def refusal(self, caller: Caller) -> bytes:
        return self._admit(caller)

    async def reply(self, question: Question) -> Reply:
        return await self._answer(question)


class _Conversation:
    """With one receiver."""

    def __init__(self, server: PeerServer, channel: trio.socket.SocketType, pid: int) -> None:
        self._server = server
        self._channel = channel
        self._pid = pid
        self._sending = trio.Lock()
        self._told: tuple[int, ...] | None = None

    async def hold(self) -> None:
        """Until the receiver ends, or is silent for too long."""
        patience_seconds = START_SECONDS
        async with trio.open_nursery() as nursery:
            while True:
                with trio.move_on_after(patience_seconds) as waiting:
                    received = await self._receive()
                if waiting.cancelled_caught:
                    log.error("receiver_silent", pid=self._pid, seconds=patience_seconds)
                    break
                if received is None:
                    break
                patience_seconds = SILENT_SECONDS
                message, fds = received
                await self._take(message, fds, nursery)
            nursery.cancel_scope.cancel()

    async def _receive(self) -> tuple[FromReceiver, list[int]] | None:
        """The next message; None at the end."""
        room = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
        try:
            data, ancillary, _, _ = await self._channel.recvmsg(
                MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            log.warning("receiver_not_heard", pid=self._pid, error=str(error))
            return None
        fds = array("i")
        for _, _, packed in ancillary:
            fds.frombytes(packed)
        return (decode_from_receiver(data), list(fds)) if data else None

    async def _take(self, message: FromReceiver, fds: list[int], nursery: trio.Nursery) -> None:
        if isinstance(message, Said):
            nursery.start_soon(self._serve, message, fds)
        elif isinstance(message, Arrived):
            refusal = self._server.refusal(Caller(message.uid, frozenset(message.groups)))
            await self._send(Admit(message.number, refusal))
        elif isinstance(message, Hung):
            self._server.user_hung(message)
        elif isinstance(message, Ready):
            self._server.serves()
        if isinstance(message, Beat | Ready):
            await self._tell_known()

    async def _tell_known(self) -> None:
        known = self._server.known_users()
        if known != self._told:
            self._told = known
            await self._send(Known(known))

    async def _serve(self, message: Said, fds: list[int]) -> None:
        question = Question(
            Caller(message.uid, frozenset(message.groups)), message.data, fds, message.trouble
        )
        try:
            reply = await self._server.reply(question)
        except Exception:
            log.exception("caller_not_served", uid=message.uid)
            reply = Reply(b"")
        await self._send(Answer(message.number, reply.data, reply.keep))

    async def _send(self, message: FromDaemon) -> None:
        try:
            async with (
                self._sending
            ):  # a message that waits for room must not be overtaken in the middle: trio refuses two at once
                await self._channel.send(encode(message))
        except OSError as error:  # it has ended; what is left of it is read next
            log.debug("receiver_not_told", pid=self._pid, error=str(error))


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that a receiver passed on: pidfds and memory files, whose close does not wait."""
    for fd in fds:
        os.close(fd)
