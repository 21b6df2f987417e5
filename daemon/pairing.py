"""Snapshots of the files for trainers (ciuic.pairing): who may ask for which, and the socket that they ask on.

Guarantees: root and the group of the control socket may have any root cut; who else asks, only roots that belong to him, or to a group of
his that may write there, as the kernel knows him and the directory. Nobody reads anything through it. What goes wrong with one caller ends
his connection alone. More than `MOST_WAITING` snapshots are not made to wait by those who may not use the control socket: what is asked
for there, and the schedule, always find a place.
"""

from __future__ import annotations

import grp
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog
import trio

from ciuic.control_types import SnapshotRequest
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.errors import Busy, CiuicError, NotFound, NotPermitted, Unreachable, UsageError
from ciuic.excludes import ExcludeMatcher
from ciuic.pairing import (
    CUT_SECONDS,
    MOST_BYTES,
    PAIRED,
    SOCKET_NAME,
    Answer,
    Cut,
    Known,
    Refused,
    States,
    Taken,
    decode_question,
    text_of,
)
from ciuic.types import Pair, SnapshotId

if TYPE_CHECKING:
    from ciuic.daemon.service import Daemon

MOST_CONNECTIONS = 64
MOST_WAITING = 4
MOST_TEXT = 200
ASK_SECONDS = 5.0
"""For a caller to say what he wants."""
_SO_PEERGROUPS = 59
_CREDENTIALS = struct.Struct("3i")
log = structlog.get_logger(__name__)


class Caller(NamedTuple):
    """As the kernel knows him."""

    uid: int
    groups: frozenset[int]


class Pairing:
    """Belongs to the trio thread."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._count = 0

    async def serve(
        self,
        stopped: Callable[[], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listens until ``stopped`` returns. A daemon without this socket is a daemon all the same."""
        path = self._daemon.runtime.path / SOCKET_NAME
        task_status.started()
        try:
            listener = _bind(path)
        except OSError as error:
            log.error("pair_socket_failed", path=str(path), error=str(error))
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._accept, trio.socket.from_stdlib_socket(listener), nursery)
                await stopped()
                nursery.cancel_scope.cancel()
        finally:
            listener.close()
            path.unlink(missing_ok=True)

    async def _accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        while True:
            try:
                connection, _ = await listener.accept()
            except OSError as error:  # out of descriptors, which passes
                log.warning("pair_not_accepted", error=str(error))
                await trio.sleep(0.1)
                continue
            if self._count >= MOST_CONNECTIONS:
                connection.close()
                continue
            self._count += 1
            nursery.start_soon(self._serve, connection)

    async def _serve(self, connection: trio.socket.SocketType) -> None:
        try:
            with trio.move_on_after(ASK_SECONDS) as patience:
                data = await connection.recv(MOST_BYTES)
            if patience.cancelled_caught or not data:
                return
            answer = await self._answer(data, _caller(connection))
            with trio.move_on_after(ASK_SECONDS):
                await connection.send(msgspec.msgpack.encode(answer))
        except OSError as error:  # a caller who hung up
            log.debug("pair_caller_gone", error=str(error))
        except Exception:
            log.exception("pair_failed")
        finally:
            connection.close()
            self._count -= 1

    async def _answer(self, data: bytes, caller: Caller) -> Answer:
        try:
            question = decode_question(data)
            if isinstance(question, Known):
                return await self._states(question.ids)
            return await self._cut(question, caller)
        except CiuicError as error:
            log.info("pair_refused", uid=caller.uid, error=error.message)
            return Refused(error.message, error.hint, error.exit_code)

    async def _states(self, ids: Sequence[str]) -> States:
        committed = await trio.to_thread.run_sync(self._daemon.store.known, frozenset(ids))
        states: dict[str, str] = {}
        for id_ in ids:
            pending = self._daemon.snapshots.state(id_)
            if pending is not None and pending.state.state != "committed":
                states[id_] = pending.state.state
            else:  # it may have been removed since
                states[id_] = "committed" if id_ in committed else "gone"
        return States(states, self._repository())

    def _repository(self) -> str:
        path = self._daemon.store.path
        return text_of(path) if path is not None else ""

    async def _cut(self, wanted: Cut, caller: Caller) -> Taken:
        training = _checked(wanted)
        if self._daemon.stopping:
            raise Unreachable("the daemon is stopping")
        privileged = caller.uid == 0 or _group_of(self._daemon.settings.group) in caller.groups
        roots = self._chosen(wanted.roots, caller, privileged=privileged)
        waiting = sum(state.state != "failed" for state in self._daemon.snapshots.unfinished())
        if not privileged and waiting >= MOST_WAITING:
            raise Busy(f"{waiting} snapshots wait for capture already")
        request = SnapshotRequest(
            message=f"files of {training}: {wanted.message[:MOST_TEXT]}".rstrip(": "),
            tags=[PAIRED],
            hold=bool(wanted.hold_reason),
            roots=[root.path for root in roots],
        )
        pair = Pair(of="training", id=training, repository=wanted.repository, time_ns=wanted.time_ns)
        pending = None
        with trio.move_on_after(CUT_SECONDS):
            pending = await self._daemon.snapshots.take(
                request, pair=pair, hold_reason=wanted.hold_reason[:MOST_TEXT]
            )
        if pending is None:
            raise Busy(f"no snapshot could be cut within {CUT_SECONDS:.0f} s")
        log.info("pair_cut", id=pending.id, training=training, uid=caller.uid)
        return Taken(
            id=pending.id,
            repository=self._repository(),
            time_ns=pending.record.time_ns,
            roots=tuple(pending.state.roots),
            note=_note(wanted.repository, roots),
        )

    def _chosen(self, wanted: Sequence[str], caller: Caller, *, privileged: bool) -> list[RootSupervisor]:
        roots = self._daemon.roots.supervisors
        mounted = [root for root in roots.values() if root.worker is not None]
        if not wanted:
            chosen = [root for root in mounted if privileged or _is_his(root, caller)]
            if mounted and not chosen:
                raise NotPermitted(
                    "no protected root belongs to you", hint="chown the root, or see [control] group"
                )
            if not chosen:
                raise CiuicError("no root is mounted", hint="ciuic status says why")
            return chosen
        chosen = []
        for path in dict.fromkeys(wanted):
            root = next((root for root in roots.values() if f"{path}/".startswith(f"{root.path}/")), None)
            if root is None:
                raise NotFound(f"{path} is not protected", hint="protect it: ciuic protect PATH")
            if root.worker is None:
                raise CiuicError(f"{root.path} is not mounted", hint="ciuic status says why")
            if not privileged and not _is_his(root, caller):
                raise NotPermitted(
                    f"{root.path} does not belong to you", hint="chown it, or see [control] group"
                )
            if root not in chosen:
                chosen.append(root)
        return chosen


def _bind(path: Path) -> socket.socket:
    """OSError. For the holder of the runtime directory's lock: what is there is a killed daemon's."""
    listener = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    )
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(MOST_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener


def _caller(connection: trio.socket.SocketType) -> Caller:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(credentials)
    groups = {gid}
    with suppress(OSError):  # more than fit: he is taken for one of few
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
        groups.update(number for (number,) in struct.iter_unpack("I", packed))
    return Caller(uid, frozenset(groups))


def _group_of(name: str | None) -> int:
    try:
        return grp.getgrnam(name).gr_gid if name else -1
    except KeyError:
        return -1


def _is_his(root: RootSupervisor, caller: Caller) -> bool:
    if root.worker is None:
        return False
    facts = os.fstat(root.worker.backing_fd)
    return facts.st_uid == caller.uid or (
        facts.st_gid in caller.groups and bool(facts.st_mode & stat.S_IWGRP)
    )


def _checked(wanted: Cut) -> str:
    """The training's id. What stands in a snapshot must be readable later."""
    try:
        training = SnapshotId.parse(wanted.training)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if (
        not wanted.repository.startswith("/")
        or "\0" in wanted.repository
        or not 0 <= wanted.time_ns < 1 << 63
    ):
        raise UsageError("the request cannot be meant")
    return str(training)


def _note(repository: str, roots: Sequence[RootSupervisor]) -> str:
    """Where a training's snapshots lie in what is captured, they are stored twice."""
    for root in roots:
        inside = os.path.relpath(repository, root.path)
        if inside == ".." or inside.startswith("../"):
            continue
        if not ExcludeMatcher(root.path, root.settings.excludes).match(os.fsencode(inside), True):
            return (
                f"{repository} is in the protected root {root.path}: each snapshot of the files stores the training's snapshots "
                f'once more; exclude = ["/{inside}"] in its [[root]] leaves them out'
            )
    return ""
