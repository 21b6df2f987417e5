"""`watch.sock`: where trainers make themselves known. One message, one answer; then the caller may go.

Guarantees: what the kernel says of the caller decides, not what the message says: somebody who is neither root nor owns the process is
refused, and so is who may not have his trainers watched at all. Every descriptor that came is ours to keep or closed. What goes wrong
with one caller ends his connection alone; one that says nothing is hung up on.
"""

from __future__ import annotations

import array
import grp
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from ciuic import processes
from ciuic.daemon.trainer import Identity
from ciuic.daemon.trainers import Trainers
from ciuic.errors import CiuicError, NotPermitted, UsageError
from ciuic.watch_client import MOST_BYTES, MOST_FDS, MOST_TEXT, SOCKET_NAME, Answer, Hello, Refused, Welcome
from ciuic.watch_page import check_page

HELLO_SECONDS: Final = 5.0
MOST_CALLERS: Final = 256
_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")
_HELLO: Final[msgspec.msgpack.Decoder[Hello]] = msgspec.msgpack.Decoder(Hello)
log = structlog.get_logger(__name__)


class Permitted:
    """Who may have his trainers watched: root, ``users`` ("*": everybody), members of ``group``, owners of roots."""

    def __init__(self, users: Iterable[str], group: str | None, owners: Iterable[int]) -> None:
        self._users = frozenset(users)
        self._group = group
        self._owners = frozenset(owners)

    def __call__(self, uid: int) -> bool:
        if uid == 0 or uid in self._owners or "*" in self._users:
            return True
        try:
            known = pwd.getpwuid(uid)
        except KeyError:
            return False
        if known.pw_name in self._users:
            return True
        with suppress(KeyError):
            found = grp.getgrnam(self._group or "")
            return known.pw_gid == found.gr_gid or known.pw_name in found.gr_mem
        return False


def bind_watch_socket(runtime_dir: Path) -> socket.socket:
    """Open to everybody; call with the runtime directory acquired. OSError."""
    path = runtime_dir / SOCKET_NAME
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
        path.chmod(0o666)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


class WatchSocket:
    """``serve`` is its task."""

    def __init__(self, trainers: Trainers, permitted: Callable[[], Permitted]) -> None:
        self._trainers = trainers
        self._permitted = permitted
        self._callers = 0

    async def serve(self, listener: socket.socket) -> None:
        """For ever. Takes ``listener`` over."""
        listening = trio.socket.from_stdlib_socket(listener)
        with listening:
            async with trio.open_nursery() as nursery:
                while True:
                    try:
                        connection, _ = await listening.accept()
                    except OSError as error:  # out of descriptors, or gone again
                        log.warning("watch_not_accepted", error=str(error))
                        await trio.sleep(1.0)
                        continue
                    nursery.start_soon(self._serve_one, connection)

    async def _serve_one(self, connection: trio.socket.SocketType) -> None:
        with connection:
            if self._callers >= MOST_CALLERS:
                return
            self._callers += 1
            try:
                answer: Answer
                try:
                    answer = await self._hear(connection)
                except CiuicError as error:
                    log.info("trainer_refused", reason=str(error))
                    answer = Refused(error.message, error.hint, error.exit_code)
                await connection.send(msgspec.msgpack.encode(answer))
                if isinstance(answer, Welcome):
                    await connection.recv(1)  # who waits here learns by our end that there is nobody
            except (OSError, trio.TooSlowError) as error:
                log.debug("watch_caller_gone", error=repr(error))
            except Exception:
                log.exception("watch_caller_failed")
            finally:
                self._callers -= 1

    async def _hear(self, connection: trio.socket.SocketType) -> Answer:
        with trio.fail_after(HELLO_SECONDS):
            room = socket.CMSG_SPACE(MOST_FDS * array.array("i").itemsize)
            data, ancillary, flags, _ = await connection.recvmsg(MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        fds = _descriptors(ancillary)
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not data:
                raise UsageError("what came is no message of a trainer")
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(credentials)
            identity, hello = self._checked(data, fds, uid)
            self._trainers.add(identity, fds[0], fds[1:], hello)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return Welcome()

    def _checked(self, data: bytes, fds: list[int], uid: int) -> tuple[Identity, Hello]:
        """Who it is. UsageError; NotPermitted."""
        if not self._permitted()(uid):
            raise NotPermitted(
                f"this daemon does not watch trainers of user {uid}",
                hint="name the user in the daemon's configuration: [watch] users",
            )
        try:
            hello = _HELLO.decode(data)
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


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
