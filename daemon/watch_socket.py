"""`watch.sock`: where trainers make themselves known. One message, one answer; then the caller may go.

Guarantees: what the kernel says of the caller decides, not what the message says: a caller whose trainers are not watched is refused
before any descriptor of its is received, and so is one that is neither root nor owns the process it speaks of. Descriptors of strangers
are received by a process of its own (peer_server.py); what comes here is a pidfd and pages, ours to keep or closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from ciuic import processes
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.peer_messages import ReceiverOptions
from ciuic.daemon.peer_server import PeerServer, Question, Reply, close_all
from ciuic.daemon.trainer import Identity
from ciuic.daemon.trainers import Trainers
from ciuic.errors import CiuicError, NotPermitted, UsageError
from ciuic.peer_socket import Caller
from ciuic.watch_client import MOST_BYTES, MOST_TEXT, SOCKET_NAME, Hello, Refused, Welcome
from ciuic.watch_page import check_page

MAX_CONNECTIONS: Final = 1024
"""Trainers keep theirs open. 512 trainers are watched at most, some with several managers."""
MAX_CONNECTIONS_OF_A_USER: Final = 256
_HELLO: Final[msgspec.msgpack.Decoder[Hello]] = msgspec.msgpack.Decoder(Hello)
log = structlog.get_logger(__name__)


async def _learn_nothing(uid: int) -> None:
    """For servers that show no names."""


class WatchSocket:
    """``serve`` is its task."""

    def __init__(
        self,
        runtime_dir: Path,
        trainers: Trainers,
        permitted: Callable[[Caller], bool],
        *,
        alerts: Alerts,
        owners: Callable[[], Iterable[int]] = tuple,
        learn_name: Callable[[int], Awaitable[None]] = _learn_nothing,
    ) -> None:
        """``owners``: users that own roots, who go before users without a trainer when there are too many connections."""
        self._trainers = trainers
        self._permitted = permitted
        self._learn_name = learn_name
        options = ReceiverOptions(
            path=str(runtime_dir / SOCKET_NAME),
            max_message_bytes=MOST_BYTES,
            max_connections=MAX_CONNECTIONS,
            max_connections_of_a_user=MAX_CONNECTIONS_OF_A_USER,
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
        """Until it is cancelled."""
        await self.server.serve()

    def _refusal(self, caller: Caller) -> bytes:
        if self._permitted(caller):
            return b""
        return _refused(_not_permitted(caller))

    async def _answer(self, question: Question) -> Reply:
        """Take over or close every descriptor of the question."""
        try:
            if question.trouble:
                raise UsageError(question.trouble)
            identity, hello = self._checked(question)
            await self._learn_name(identity.uid)
            self._trainers.add(identity, question.fds[0], question.fds[1:], hello)
        except CiuicError as error:
            close_all(question.fds)
            return Reply(_refused(error))
        except BaseException:
            close_all(question.fds)
            raise
        return Reply(msgspec.msgpack.encode(Welcome()), keep=True)

    def _checked(self, question: Question) -> tuple[Identity, Hello]:
        """Return which process it is, and what it said. UsageError; NotPermitted."""
        uid, fds = question.caller.uid, question.fds
        if not self._permitted(question.caller):  # the configuration may have changed since it was admitted
            raise _not_permitted(question.caller)
        try:
            hello = _HELLO.decode(question.data)
            texts = (hello.name, hello.where)
            if not hello.name or any(len(text) > MOST_TEXT or not text.isprintable() for text in texts):
                raise UsageError("a name that is empty, too long, or not to be printed")
            if not fds or not 0 <= hello.heartbeat_seconds < float("inf") or hello.kind == "file":
                raise UsageError("what came is no message of a trainer")
            pid = processes.pid_of(fds[0])
            for page in fds[1:]:
                check_page(page)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OSError) as error:
            raise UsageError(f"what came is no message of a trainer: {error}") from error
        if (
            pid <= 0
        ):  # it has ended already, or lives where we do not see it: then it is the caller's own word
            return Identity(uid, hello.pid, hello.start_ticks), hello
        its_owner = processes.owner(pid)
        if uid not in (0, its_owner) and its_owner != -1:
            raise NotPermitted(f"process {pid} belongs to somebody else")
        return Identity(
            its_owner if uid == 0 and its_owner >= 0 else uid, pid, processes.start_ticks(pid)
        ), hello


def _not_permitted(caller: Caller) -> NotPermitted:
    return NotPermitted(
        f"this daemon does not watch trainers of user {caller.uid}",
        hint="name the user in the daemon's configuration: [watch] users",
    )


def _refused(error: CiuicError) -> bytes:
    log.info("trainer_refused", reason=str(error))
    return msgspec.msgpack.encode(Refused(error.message, error.hint, error.exit_code))
