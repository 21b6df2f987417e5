"""Registration of trainers on `watch.sock`: one message, one answer.

Then the caller may close the connection.

Guarantees: the kernel's credentials of the caller decide, not its message: a caller whose trainers are not
watched is refused before any descriptor of its is received, and a caller that is neither root nor the owner
of the registered process is refused too. Descriptors of unprivileged callers are received by a process of its
own (peer_server.py); only a pidfd and pages come here, and are kept or closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from ciuic.daemon.base.events import Alerts
from ciuic.daemon.peer_messages import ReceiverOptions
from ciuic.daemon.peer_server import PeerQuestion, PeerReply, PeerServer, close_all
from ciuic.daemon.trainers.registry import TrainerRegistry
from ciuic.daemon.trainers.trainer import ProcessIdentity
from ciuic.errors import CiuicError, NotPermitted, UsageError
from ciuic.protocol.heartbeat_page import check_page
from ciuic.protocol.peer_socket import Caller
from ciuic.protocol.watch_client import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT_CHARACTERS,
    SOCKET_NAME,
    Hello,
    WatchRefused,
    Welcome,
)
from ciuic.system import processes

# Connections, which trainers keep open. 512 trainers are watched at most, some with several managers.
MAX_CONNECTIONS: Final = 1024
_MAX_CONNECTIONS_OF_A_USER: Final = 256
_HELLO: Final[msgspec.msgpack.Decoder[Hello]] = msgspec.msgpack.Decoder(Hello)
log = structlog.get_logger(__name__)


async def _learn_nothing(uid: int) -> None:
    """Do nothing: for servers that show no names of users."""


class WatchSocket:
    """Server of the socket. `serve` is its task."""

    def __init__(
        self,
        runtime_dir: Path,
        trainers: TrainerRegistry,
        permitted: Callable[[Caller], bool],
        *,
        alerts: Alerts,
        owners: Callable[[], Iterable[int]] = tuple,
        learn_name: Callable[[int], Awaitable[None]] = _learn_nothing,
    ) -> None:
        """Prepare to listen.

        Args:
            runtime_dir: directory of the socket.
            trainers: where trainers are registered.
            permitted: whether the trainers of a caller are watched.
            alerts: where a receiver that ends is reported.
            owners: users that own roots, which have precedence over users without a trainer when there are
                too many connections.
            learn_name: looks up the name of a user for display.
        """
        self._trainers = trainers
        self._permitted = permitted
        self._learn_name = learn_name
        options = ReceiverOptions(
            path=str(runtime_dir / SOCKET_NAME),
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_connections=MAX_CONNECTIONS,
            max_connections_of_a_user=_MAX_CONNECTIONS_OF_A_USER,
            takes_descriptors=True,
        )
        self.server = PeerServer(
            options,
            self._answer,
            alerts=alerts,
            admit=self._refusal,
            known=lambda: {*owners(), *trainers.uids()},
        )

    async def serve(self) -> None:
        """Serve, until cancelled."""
        await self.server.serve()

    def _refusal(self, caller: Caller) -> bytes:
        if self._permitted(caller):
            return b""
        return _refused(_not_permitted(caller))

    async def _answer(self, question: PeerQuestion) -> PeerReply:
        """Take over or close every descriptor of the question."""
        try:
            if question.trouble:
                raise UsageError(question.trouble)
            identity, hello = self._checked(question)
            # Before the trainer is added, which is shown from then on: `user_name` asks no service.
            await self._learn_name(identity.uid)
            self._trainers.add(identity, question.fds[0], question.fds[1:], hello)
        except CiuicError as error:
            close_all(question.fds)
            return PeerReply(_refused(error))
        except BaseException:
            # On cancellation too the descriptors are this handler's to close.
            close_all(question.fds)
            raise
        return PeerReply(msgspec.msgpack.encode(Welcome()), keep=True)

    def _checked(self, question: PeerQuestion) -> tuple[ProcessIdentity, Hello]:
        """Return the process that the caller registers, and its message; raise UsageError and NotPermitted."""
        uid, fds = question.caller.uid, question.fds
        # Checked again: the configuration may have changed since the connection was admitted.
        if not self._permitted(question.caller):
            raise _not_permitted(question.caller)
        try:
            hello = _HELLO.decode(question.data)
            texts = (hello.name, hello.where)
            if not hello.name or any(
                len(text) > MAX_TEXT_CHARACTERS or not text.isprintable() for text in texts
            ):
                raise UsageError(
                    f"name and where must be printable and at most {MAX_TEXT_CHARACTERS} characters long, and name not empty"
                )
            if not fds or not 0 <= hello.heartbeat_seconds < float("inf") or hello.kind == "file":
                raise UsageError("the message is no registration of a trainer")
            pid = processes.pid_of(fds[0])
            for page in fds[1:]:
                check_page(page)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OSError) as error:
            raise UsageError(f"the message is no registration of a trainer: {error}") from error
        # The process has ended already, or is in another pid namespace: its pid is what the caller says.
        if pid <= 0:
            return ProcessIdentity(uid, hello.pid, hello.start_ticks), hello
        its_owner = processes.owner(pid)
        # -1: the process has been reaped since its pid was read, and has no owner any more.
        if uid not in (0, its_owner) and its_owner != -1:
            raise NotPermitted(f"process {pid} belongs to somebody else")
        return ProcessIdentity(
            its_owner if uid == 0 and its_owner >= 0 else uid, pid, processes.start_ticks(pid)
        ), hello


def _not_permitted(caller: Caller) -> NotPermitted:
    return NotPermitted(
        f"this daemon does not watch trainers of user {caller.uid}",
        hint="name the user in the daemon's configuration: [watch] users",
    )


def _refused(error: CiuicError) -> bytes:
    log.info("trainer_refused", reason=str(error))
    return msgspec.msgpack.encode(WatchRefused(error.message, error.hint, error.exit_code))
