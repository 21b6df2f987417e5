"""Server of a socket for unprivileged callers.

The daemon's side of a receiver process (peer_receiver.py), which is kept running.

Guarantees: the daemon itself never holds a caller's connection or descriptor, so that no caller can block it;
an error with one caller ends that caller's connection alone; a receiver that ends or falls silent is
replaced, and one that does not end when it is killed is left behind, with an alert, while its successor
serves. Belongs to the trio thread.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog
import trio

from ciuic.daemon.base.child_processes import mark_expendable, restart_pause_seconds
from ciuic.daemon.base.events import Alerts
from ciuic.daemon.peer_messages import (
    MAX_MESSAGE_BYTES,
    Admit,
    AnswerCaller,
    Arrived,
    Beat,
    FromDaemon,
    FromReceiver,
    Hung,
    KnownUsers,
    Ready,
    ReceiverOptions,
    Said,
)
from ciuic.protocol.peer_socket import Caller
from ciuic.protocol.watch_client import MAX_FDS
from ciuic.structs import decode_msgpack
from ciuic.system.child_process import environment, module_command
from ciuic.system.processes import describe_exit
from ciuic.system.unix_sockets import descriptors_in, room_for

# Time limit for the start of a receiver: a tenth of a second as a rule, and much longer on an overloaded
# host.
_START_SECONDS: Final = 60.0
# Silence after which a receiver is replaced: it sends a heartbeat every second, and does nothing that takes
# longer than milliseconds.
SILENT_SECONDS: Final = 20.0
# Time for a receiver to end after its channel was closed, and again after SIGKILL.
_END_SECONDS: Final = 2.0
# Life of a receiver that ends a row of those that ended.
_STABLE_SECONDS: Final = 60.0
# Receivers that were killed and did not end. With so many the socket is not served until one of them has.
_MAX_LEFT_BEHIND: Final = 4
# Period of looking after a hung helper of which no pidfd could be had.
_LOOK_AGAIN_SECONDS: Final = 10.0
RECEIVER_COMMAND: Final = tuple(module_command("ciuic.daemon.peer_receiver"))
log = structlog.get_logger(__name__)


class PeerQuestion(NamedTuple):
    """Message of a caller, as the receiver passed it on."""

    caller: Caller
    data: bytes
    fds: list[int]
    """A pidfd and pages, which the handler takes over or closes; only for a socket that takes descriptors."""
    trouble: str
    """Reason for which the message could not be received; empty: it was."""


class PeerReply(NamedTuple):
    """Answer to a caller."""

    data: bytes
    keep: bool = False
    """Leave the connection open; its end tells the caller when there is no daemon any more."""


class PeerServer:
    """Server of one socket. `serve` is its task."""

    def __init__(
        self,
        options: ReceiverOptions,
        answer: Callable[[PeerQuestion], Awaitable[PeerReply]],
        *,
        alerts: Alerts,
        admit: Callable[[Caller], bytes] = lambda caller: b"",
        known: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """Prepare to serve.

        Args:
            options: options of the receiver process.
            answer: answers a message.
            alerts: where failures of receivers are reported.
            admit: returns the refusal of a caller, empty for one that is served; used where descriptors are
                taken.
            known: returns users with precedence when there are too many connections.
        """
        self._options = options
        self.answer = answer
        self._alerts = alerts
        self.admit = admit
        self._known = known
        self._command = list(RECEIVER_COMMAND)
        self._name = Path(options.path).name
        # Nursery of `serve`, for waits that outlast one receiver.
        self._nursery: trio.Nursery
        # Helpers that cannot be killed, by user.
        self._hung: Counter[int] = Counter()
        self._left_behind = 0
        self._one_has_ended = trio.Event()
        self.ready = trio.Event()
        """Set when the first receiver listens."""

    async def serve(self) -> None:
        """Serve, until cancelled. On return no receiver lives, except one that cannot be killed."""
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
                # A nursery's error comes as an ExceptionGroup, which is no OSError whatever it holds. A defect
                # with one socket costs its receiver, and must not end the daemon.
                except Exception as error:
                    log.exception("receiver_given_up", socket=self._name)
                    self._report(f"its process was ended after a defect: {error!r}")
                failures = 1 if trio.current_time() - began >= _STABLE_SECONDS else failures + 1
                await trio.sleep(restart_pause_seconds(failures))
                await self._room_to_fail()

    async def _run_one(self) -> None:
        """Run one receiver from its start to its end."""
        # SOCK_SEQPACKET: messages stay apart, and descriptors arrive with theirs.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = trio.socket.from_stdlib_socket(ours)
        with channel:
            with theirs:
                process = await trio.lowlevel.open_process(
                    [*self._command, str(theirs.fileno()), msgspec.json.encode(self._options).decode()],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # A Ctrl-C or a kill of the daemon's process group is not for the receiver, which ends
                    # with the channel.
                    start_new_session=True,
                    cwd="/",
                    env=environment(),
                )
            try:
                mark_expendable(process.pid)
                await _Conversation(self, channel, process.pid).hold()
            finally:
                channel.close()  # the receiver ends when it reads the end of the channel
                # Shielded: on return no receiver may be left.
                with trio.CancelScope(shield=True):
                    await self._end(process)
        log.warning(
            "receiver_ended", socket=self._name, pid=process.pid, how=describe_exit(process.returncode)
        )

    async def _end(self, process: trio.Process) -> None:
        with trio.move_on_after(_END_SECONDS):
            await process.wait()
            return
        process.kill()
        with trio.move_on_after(_END_SECONDS):
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
        while self._left_behind >= _MAX_LEFT_BEHIND:
            await self._one_has_ended.wait()

    def _report(self, trouble: str) -> None:
        self._alerts.report(
            f"socket:{self._name}",
            f"{self._options.path} is not served as it should be: {trouble}",
            hint="see the daemon's log; ps shows processes in state D, and whose file system they wait for",
            severity="warning",
        )

    def serves(self) -> None:
        """Report that a receiver listens."""
        self.ready.set()
        if not self._left_behind:
            self._alerts.clear(f"socket:{self._name}")

    def user_hung(self, message: Hung) -> None:
        """Report an alert as long as a helper waits for a descriptor of a user to close."""
        try:
            # The helper may outlive its receiver, so its end is watched here. Opened at once: as long as the
            # receiver has not reaped the helper, its pid is no other process's.
            pidfd = os.pidfd_open(message.pid)
        except ProcessLookupError:
            return
        except OSError as error:
            log.warning("helper_not_watched", socket=self._name, pid=message.pid, error=str(error))
            pidfd = -1
        self._hung[message.uid] += 1
        self._nursery.start_soon(self._await_hung, message.uid, message.pid, pidfd)
        log.error("descriptor_does_not_close", socket=self._name, uid=message.uid, pid=message.pid)
        self._alerts.report(
            f"socket:{self._name}:{message.uid}",
            f"user {message.uid} sent a descriptor to {self._options.path} that does not close: process {message.pid} waits for it",
            hint=f"user {message.uid} is refused there until that process has ended and 10 minutes more; "
            "if it is a file system of that user's, umount -f ends it",
            severity="warning",
        )

    async def _await_hung(self, uid: int, pid: int, pidfd: int) -> None:
        """Wait for the end of a hung helper.

        Args:
            uid: user whose descriptor does not close.
            pid: pid of the helper.
            pidfd: descriptor of the helper, which is closed; -1 where none could be opened.
        """
        try:
            # Without a pidfd (EMFILE) another process may get the pid later, and the alert then stands for
            # longer than it has to.
            while pidfd < 0 and _process_exists(pid):
                await trio.sleep(_LOOK_AGAIN_SECONDS)
                with suppress(OSError):
                    pidfd = os.pidfd_open(pid)
            if pidfd >= 0:
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        self._hung[uid] -= 1
        if not self._hung[uid]:
            del self._hung[uid]
            self._alerts.clear(f"socket:{self._name}:{uid}")

    def known_users(self) -> tuple[int, ...]:
        """Return the users with precedence, sorted."""
        return tuple(sorted(set(self._known())))


class _Conversation:
    """Conversation with one receiver process."""

    def __init__(self, server: PeerServer, channel: trio.socket.SocketType, pid: int) -> None:
        self._server = server
        self._channel = channel
        self._pid = pid
        # Held during a send; messages of several tasks go through the same socket.
        self._sending = trio.Lock()
        self._told: tuple[int, ...] | None = None

    async def hold(self) -> None:
        """Handle messages until the receiver ends or is silent for too long."""
        patience_seconds = _START_SECONDS
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
        """Return the next message that can be decoded; None at the end."""
        while True:
            try:
                data, ancillary, _, _ = await self._channel.recvmsg(
                    MAX_MESSAGE_BYTES, room_for(MAX_FDS), socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                log.warning("receiver_not_heard", pid=self._pid, error=str(error))
                return None
            fds = descriptors_in(ancillary)
            if not data:
                return None
            try:
                message: FromReceiver = decode_msgpack(data, FromReceiver)
                return message, fds
            # Messages stay apart on the channel (SOCK_SEQPACKET), so that the next one can be read; the
            # connection that this one was of waits in vain, and is closed at its deadline. A receiver that
            # sends nothing else counts as silent.
            except msgspec.DecodeError as error:
                close_all(fds)
                log.error("message_not_decoded", pid=self._pid, size_bytes=len(data), error=str(error))

    async def _take(self, message: FromReceiver, fds: list[int], nursery: trio.Nursery) -> None:
        try:
            await self._handle(message, fds, nursery)
        # As a rule no descriptor is left (EMFILE). The connection that the message is of is not admitted or
        # not answered, and the receiver closes it at its deadline; all others go on.
        except Exception:
            log.exception("message_not_handled", pid=self._pid, message=type(message).__name__)

    async def _handle(self, message: FromReceiver, fds: list[int], nursery: trio.Nursery) -> None:
        if isinstance(message, Said):
            nursery.start_soon(self._serve, message, fds)
            return
        close_all(fds)  # no other message has descriptors, unless the receiver has a defect
        if isinstance(message, Arrived):
            refusal = self._server.admit(Caller(message.uid, frozenset(message.groups)))
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
            await self._send(KnownUsers(known))

    async def _serve(self, message: Said, fds: list[int]) -> None:
        question = PeerQuestion(
            Caller(message.uid, frozenset(message.groups)), message.data, fds, message.trouble
        )
        try:
            reply = await self._server.answer(question)
        except Exception:
            log.exception("caller_not_served", uid=message.uid)
            reply = PeerReply(b"")
        await self._send(AnswerCaller(message.number, reply.data, reply.keep))

    async def _send(self, message: FromDaemon) -> None:
        try:
            # One send at a time: while a message waits for room in the socket, trio refuses a second send.
            async with self._sending:
                await self._channel.send(msgspec.msgpack.encode(message))
        except OSError as error:  # the receiver has ended; its last messages are still to be read
            log.debug("receiver_not_told", pid=self._pid, error=str(error))


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that a receiver passed on: pidfds and memory files, whose close does not wait."""
    for fd in fds:
        os.close(fd)
