"""Snapshots of the files for trainers (ciuic.pairing): who may ask for which, and what is answered.

Guarantees: root and the group of the control socket may have any root cut; other callers only roots that belong to their user, or to a
group of theirs that may write there, as the kernel knows them and the directory (permission.py). Nobody reads content through the
socket, and of snapshots only those learn that may have them taken. More than `MAX_WAITING` snapshots are not made to wait by those who
may not use the control socket: what is asked for there, and the schedule, always find a place. What they have held is limited
(user_holds.py). Leaves the socket to peer_server.py.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from ciuic.control_types import SnapshotRequest
from ciuic.daemon.peer_messages import ReceiverOptions
from ciuic.daemon.peer_server import PeerServer, Question, Reply
from ciuic.daemon.permission import is_administrator, owns
from ciuic.daemon.supervisor import RootSupervisor, backing_descriptors
from ciuic.daemon.user_holds import UserHolds
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
from ciuic.peer_socket import Caller
from ciuic.types import Pair, SnapshotId
from ciuic.units import plural

if TYPE_CHECKING:
    from ciuic.daemon.service import Daemon

MAX_CONNECTIONS: Final = 256
MAX_CONNECTIONS_OF_A_USER: Final = 64
"""As many ranks of one training as ask at the same moment."""
MAX_WAITING: Final = 4
MAX_TEXT: Final = 200
log = structlog.get_logger(__name__)


class Pairing:
    """Belongs to the trio thread. ``serve`` is its task."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._holds = UserHolds(
            lambda: daemon.settings.holds, lambda: daemon.store, daemon.snapshots.pending_records
        )
        options = ReceiverOptions(
            path=str(daemon.runtime.path / SOCKET_NAME),
            max_message_bytes=MOST_BYTES,
            max_connections=MAX_CONNECTIONS,
            max_connections_of_a_user=MAX_CONNECTIONS_OF_A_USER,
        )
        self._server = PeerServer(options, self._answer, alerts=daemon.alerts, known=self._known_users)

    async def serve(
        self,
        stopped: Callable[[], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until ``stopped`` returns. A daemon without this socket is a daemon all the same."""
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._server.serve)
                await stopped()
                nursery.cancel_scope.cancel()
        finally:
            with suppress(OSError):
                (self._daemon.runtime.path / SOCKET_NAME).unlink(missing_ok=True)

    def _known_users(self) -> frozenset[int]:
        with backing_descriptors(self._daemon.roots.supervisors.values()) as fds:
            owners = {os.fstat(fd).st_uid for fd in fds}
        return frozenset({*owners, *self._daemon.watch.uids()})

    async def _answer(self, question: Question) -> Reply:
        return Reply(msgspec.msgpack.encode(await self._answered(question)))

    async def _answered(self, question: Question) -> Answer:
        caller = question.caller
        try:
            asked = decode_question(question.data)
            if isinstance(asked, Known):
                return await self._states(asked.ids, caller)
            return await self._cut(asked, caller)
        except CiuicError as error:
            log.info("pair_refused", uid=caller.uid, error=error.message)
            return Refused(error.message, error.hint, error.exit_code)

    # -- which snapshots there are

    async def _states(self, ids: Sequence[str], caller: Caller) -> States:
        """Answer an id that the caller may not know of as one that does not exist, after the same work."""
        found = {id_: self._daemon.snapshots.state(id_) for id_ in ids}
        if self._is_administrator(caller):
            visible = frozenset(ids)
            committed = await trio.to_thread.run_sync(self._daemon.store.known, visible)
        else:
            roots = frozenset(
                path for path, root in self._daemon.roots.supervisors.items() if owns(caller, root)
            )
            visible = frozenset(
                id_
                for id_, pending in found.items()
                if pending is not None
                and (pending.record.user == caller.uid or not roots.isdisjoint(pending.state.roots))
            )
            committed = await trio.to_thread.run_sync(self._daemon.store.known_of, visible, roots)
        states: dict[str, str] = {}
        for id_, pending in found.items():
            if pending is not None and id_ in visible and pending.state.state != "committed":
                states[id_] = pending.state.state
            else:  # it may have been removed since
                states[id_] = "committed" if id_ in committed else "gone"
        return States(states, self._repository())

    def _repository(self) -> str:
        path = self._daemon.store.path
        return text_of(path) if path is not None else ""

    def _is_administrator(self, caller: Caller) -> bool:
        return is_administrator(caller, self._daemon.accounts.group_id)

    # -- taking one

    async def _cut(self, wanted: Cut, caller: Caller) -> Taken:
        training = _checked(wanted)
        if self._daemon.stopping:
            raise Unreachable("the daemon is stopping")
        privileged = self._is_administrator(caller)
        roots = self._chosen(wanted.roots, caller, privileged=privileged)
        waiting = sum(state.state != "failed" for state in self._daemon.snapshots.unfinished())
        if not privileged and waiting >= MAX_WAITING:
            raise Busy(f"{plural(waiting, 'snapshot waits', 'snapshots wait')} for capture already")
        request = SnapshotRequest(
            message=f"files of {training}: {wanted.message[:MAX_TEXT]}".rstrip(": "),
            tags=[PAIRED],
            roots=[root.path for root in roots],
        )
        pair = Pair(of="training", id=training, repository=wanted.repository, time_ns=wanted.time_ns)
        pending = None
        refusal = await self._hold_refusal(wanted, caller, privileged=privileged)
        request.hold = bool(wanted.hold_reason) and not refusal
        try:
            with trio.move_on_after(CUT_SECONDS):
                pending = await self._daemon.snapshots.take(
                    request,
                    pair=pair,
                    hold_reason=wanted.hold_reason[:MAX_TEXT] if request.hold else "",
                    user=None if privileged else caller.uid,
                )
        finally:
            if request.hold and not privileged:
                self._holds.settled(caller.uid)
        if pending is None:
            raise Busy(f"no snapshot could be cut within {CUT_SECONDS:.0f} s")
        log.info("pair_cut", id=pending.id, training=training, uid=caller.uid)
        return Taken(
            id=pending.id,
            repository=self._repository(),
            time_ns=pending.record.time_ns,
            roots=tuple(pending.state.roots),
            note="; ".join(filter(None, (refusal, _note(wanted.repository, roots)))),
        )

    async def _hold_refusal(self, wanted: Cut, caller: Caller, *, privileged: bool) -> str:
        """Return why what is wanted held is not; empty where it is, or is not wanted held."""
        if privileged or not wanted.hold_reason:
            return ""
        refusal = await self._holds.refusal(caller.uid)
        if refusal:
            log.warning("hold_refused", uid=caller.uid, reason=refusal)
        return refusal

    def _chosen(self, wanted: Sequence[str], caller: Caller, *, privileged: bool) -> list[RootSupervisor]:
        roots = self._daemon.roots.supervisors
        mounted = [root for root in roots.values() if root.worker is not None]
        if not wanted:
            chosen = [root for root in mounted if privileged or owns(caller, root)]
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
            if not privileged and not owns(caller, root):
                raise NotPermitted(
                    f"{root.path} does not belong to you", hint="chown it, or see [control] group"
                )
            if root not in chosen:
                chosen.append(root)
        return chosen


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
