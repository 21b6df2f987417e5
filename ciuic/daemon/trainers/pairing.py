"""Snapshots of files that users request: as pairs of their training states, or of their jobs (ciuic.protocol.pairing).

Guarantees: root and the group of the control socket may have any root cut; other callers only roots that
belong to their user, or to a group of theirs that may write there, by the kernel's credentials of the caller
and the owner of the directory (permission.py). No content can be read through the socket, and only callers
that may have a snapshot taken learn of it. Callers without the right to the control socket have a part of the
queue's places (pending.py), so that requests on the control socket and the schedule always find one.

A hold keeps a snapshot from retention, so each costs the repository's disk for as long as it stands. The
holds of ordinary users are limited in number, as the repository has them, and by the hour; administrators
have no limit. The number counts across daemons, because the repository records for whom each hold is; the
rate counts in one daemon's life. A refused hold costs the user no snapshot: the snapshot is taken and not
held. Snapshots that are not held cost the time of the daemon and of retention: ordinary users have a rate for these, too.

Leaves the socket to peer_server.py.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from ciuic.config import HoldsConfig
from ciuic.daemon.base.events import Alerts
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import PendingRecord
from ciuic.daemon.peer_messages import ReceiverOptions
from ciuic.daemon.peer_server import PeerQuestion, PeerReply, PeerServer
from ciuic.daemon.roots.permission import is_administrator, owners, owns
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.requests import Snapshots
from ciuic.errors import Busy, CiuicError, NotFound, NotPermitted, Unreachable, UsageError
from ciuic.excludes import ExcludeMatcher
from ciuic.printable import path_text
from ciuic.protocol.control_types import SnapshotRequest
from ciuic.protocol.pairing import (
    CUT_SECONDS,
    MAX_MESSAGE_BYTES,
    Answer,
    Cut,
    Files,
    Known,
    States,
    Taken,
    decode_question,
)
from ciuic.protocol.peer_socket import Caller, Refused
from ciuic.system.slurm import is_job_tag
from ciuic.types import PAIRED, Pair, SnapshotId
from ciuic.units import plural

_HOUR_SECONDS: Final = 3600.0
# More than trainings and jobs of one user ask for: 8 that save every 30 s, or a dozen that end at once.
_MAX_CUTS_OF_A_USER: Final = 12
_CUTS_SECONDS: Final = 30.0
# Users whose rate is remembered: users in a container are created at no cost, and must not fill the memory.
_MAX_USERS: Final = 1024
# One connection for each request, which is answered and closed.
_MAX_CONNECTIONS: Final = 256
# Ranks of one training that may ask at the same moment.
_MAX_CONNECTIONS_OF_A_USER: Final = 64
# Length of texts of a caller that go into a snapshot's message.
_MAX_TEXT: Final = 200
# As many as `job_tags` makes.
_MAX_JOB_TAGS: Final = 4
log = structlog.get_logger(__name__)


class _Rate:
    """Times at which each user was granted something within the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._granted: dict[int, deque[float]] = {}

    def recent(self, uid: int) -> deque[float]:
        """Return the times of a user, the oldest first; append to it what is granted."""
        since = trio.current_time() - self._seconds
        recent = self._granted.setdefault(uid, deque())
        while recent and recent[0] < since:
            recent.popleft()
        if len(self._granted) > _MAX_USERS:
            self._granted = {other: times for other, times in self._granted.items() if times or other == uid}
        return recent


class _UserHolds:
    """Limits of one daemon. Belongs to the trio thread."""

    def __init__(
        self,
        limits: Callable[[], HoldsConfig],
        store: Callable[[], Store],
        pending: Callable[[], Iterable[PendingRecord]],
    ) -> None:
        self._limits = limits
        self._store = store
        self._pending = pending
        self._rate = _Rate(_HOUR_SECONDS)
        # Holds granted to each user for snapshots that are not cut yet.
        self._under_way: Counter[int] = Counter()

    async def refusal(self, uid: int) -> str:
        """Return why this user gets no further hold now; empty when it gets one, which counts from now on.

        After an empty answer call `settled` when the snapshot is cut or will not be.
        """
        limits = self._limits()
        recent = self._rate.recent(uid)
        if len(recent) >= limits.max_of_a_user_per_hour:
            return f"it is not held: user {uid} has had {len(recent)} held within the hour"
        # Both before the await: further requests of this user meanwhile must see this one.
        recent.append(trio.current_time())
        self._under_way[uid] += 1
        try:
            held = await trio.to_thread.run_sync(self._store().held_for, uid)
        except CiuicError:
            held = frozenset()  # the repository cannot be read, so nothing can be committed to it either
        # A union of ids: a snapshot that was committed just now may be in both.
        held |= {record.id for record in self._pending() if record.hold and record.user == uid}
        if len(held) + self._under_way[uid] > limits.max_of_a_user:
            recent.pop()
            self.settled(uid)
            return f"it is not held: {plural(len(held), 'snapshot is', 'snapshots are')} held for user {uid} already"
        return ""

    def settled(self, uid: int) -> None:
        """Report that the snapshot of a granted hold is pending now, or was not cut."""
        self._under_way[uid] -= 1
        if not self._under_way[uid]:
            del self._under_way[uid]


class Pairing:
    """Service for pairs. `serve` is its task; belongs to the trio thread."""

    def __init__(
        self,
        socket: Path,
        *,
        holds: Callable[[], HoldsConfig],
        store: Callable[[], Store],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        snapshots: Snapshots,
        alerts: Alerts,
        group_id: Callable[[], int | None],
        watched_users: Callable[[], Iterable[int]],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Prepare to listen on `socket`.

        Args:
            socket: path of the socket.
            holds: limits of what ordinary users may have held.
            store: the repository.
            roots: supervisors of the roots, by path.
            snapshots: takes the snapshots that are asked for.
            alerts: where a receiver that ends is reported.
            group_id: group of the control socket, whose members are administrators.
            watched_users: users with a trainer that is watched.
            is_stopping: whether the daemon is stopping and takes no further request.
        """
        self._path = socket
        self._store = store
        self._roots = roots
        self._snapshots = snapshots
        self._group_id = group_id
        self._watched_users = watched_users
        self._is_stopping = is_stopping
        self._holds = _UserHolds(holds, store, snapshots.pending_records)
        self._cuts = _Rate(_CUTS_SECONDS)
        options = ReceiverOptions(
            path=str(socket),
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_connections=_MAX_CONNECTIONS,
            max_connections_of_a_user=_MAX_CONNECTIONS_OF_A_USER,
        )
        self._server = PeerServer(options, self._answer, alerts=alerts, known=self._known_users)

    async def serve(
        self,
        stopped: Callable[[], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until `stopped` returns. A failure of this socket does not keep the daemon from starting."""
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._server.serve)
                await stopped()
                nursery.cancel_scope.cancel()
        finally:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _known_users(self) -> frozenset[int]:
        return frozenset({*owners(self._roots().values()), *self._watched_users()})

    async def _answer(self, question: PeerQuestion) -> PeerReply:
        return PeerReply(msgspec.msgpack.encode(await self._answered(question)))

    async def _answered(self, question: PeerQuestion) -> Answer:
        caller = question.caller
        try:
            asked = decode_question(question.data)
            if isinstance(asked, Known):
                return await self._states(asked.ids, caller)
            if isinstance(asked, Files):
                return await self._files(asked, caller)
            return await self._cut(asked, caller)
        except CiuicError as error:
            log.info("pair_refused", uid=caller.uid, error=error.message)
            return Refused.of(error)

    # -- states of snapshots

    async def _states(self, ids: Sequence[str], caller: Caller) -> States:
        """Return the states of snapshots.

        An id that the caller may not know of looks like an unknown one, also by the time taken.
        """
        found = {id_: self._snapshots.state(id_) for id_ in ids}
        if self._is_administrator(caller):
            visible = frozenset(ids)
            committed = await trio.to_thread.run_sync(self._store().known, visible)
        else:
            roots = frozenset(path for path, root in self._roots().items() if owns(caller, root))
            visible = frozenset(
                id_
                for id_, pending in found.items()
                if pending is not None
                and (pending.record.user == caller.uid or not roots.isdisjoint(pending.state.roots))
            )
            committed = await trio.to_thread.run_sync(self._store().known_of, visible, roots)
        states: dict[str, str] = {}
        for id_, pending in found.items():
            if pending is not None and id_ in visible and pending.state.state != "committed":
                states[id_] = pending.state.state
            else:  # a committed snapshot may have been removed since
                states[id_] = "committed" if id_ in committed else "gone"
        return States(states, self._repository())

    def _repository(self) -> str:
        path = self._store().path
        return path_text(path) if path is not None else ""

    def _is_administrator(self, caller: Caller) -> bool:
        return is_administrator(caller, self._group_id())

    # -- taking a snapshot

    async def _cut(self, wanted: Cut, caller: Caller) -> Taken:
        training = _checked(wanted)
        roots, user = self._admitted(wanted.roots, caller)
        request = SnapshotRequest(
            message=f"files of {training}: {wanted.message[:_MAX_TEXT]}".rstrip(": "),
            tags=[PAIRED],
            roots=[root.path for root in roots],
        )
        pair = Pair(of="training", id=training, repository=wanted.repository, time_ns=wanted.time_ns)
        refusal = await self._hold_refusal(wanted, caller, privileged=user is None)
        request.hold = bool(wanted.hold_reason) and not refusal
        try:
            taken = await self._take(
                request, user, pair, wanted.hold_reason[:_MAX_TEXT] if request.hold else ""
            )
        finally:
            if request.hold and user is not None:
                self._holds.settled(caller.uid)
        log.info("pair_cut", id=taken.id, training=training, uid=caller.uid)
        note = "; ".join(filter(None, (refusal, _note(wanted.repository, roots))))
        return msgspec.structs.replace(taken, note=note)

    async def _files(self, wanted: Files, caller: Caller) -> Taken:
        """Take a snapshot of a job's files."""
        if not wanted.roots:
            raise UsageError("the directories of the job are to be named")
        if len(wanted.tags) > _MAX_JOB_TAGS or not all(map(is_job_tag, wanted.tags)):
            raise UsageError("a job's snapshot has tags of its job alone, such as slurm-job=7")
        roots, user = self._admitted(wanted.roots, caller)
        request = SnapshotRequest(
            message=wanted.message[:_MAX_TEXT],
            tags=list(wanted.tags),
            roots=[root.path for root in roots],
        )
        taken = await self._take(request, user)
        log.info("job_cut", id=taken.id, tags=wanted.tags, uid=caller.uid)
        return taken

    def _admitted(self, wanted: Sequence[str], caller: Caller) -> tuple[list[RootSupervisor], int | None]:
        """Return the roots that the caller may have a snapshot of, and its user; None for an administrator."""
        if self._is_stopping():
            raise Unreachable("the daemon is stopping")
        privileged = self._is_administrator(caller)
        roots = self._chosen(wanted, caller, privileged=privileged)
        if privileged:
            return roots, None
        if self._snapshots.is_full(caller.uid):
            raise Busy("as many snapshots of ordinary users wait for capture as may wait at once")
        recent = self._cuts.recent(caller.uid)
        if len(recent) >= _MAX_CUTS_OF_A_USER:
            raise Busy(
                f"user {caller.uid} has asked for {plural(len(recent), 'snapshot')} within {_CUTS_SECONDS:.0f} s",
                hint="take them less often; root and members of [control] group have no such limit",
            )
        # Before the cut: further requests meanwhile must see this one.
        recent.append(trio.current_time())
        return roots, caller.uid

    async def _take(
        self, request: SnapshotRequest, user: int | None, pair: Pair | None = None, hold_reason: str = ""
    ) -> Taken:
        """Cut a snapshot within `CUT_SECONDS`."""
        pending = None
        # Files of a later instant would not belong to the state. A request that is given up may be cut
        # all the same: its files name a state that does not name them (docs/decisions/pairs.md).
        with trio.move_on_after(CUT_SECONDS):
            pending = await self._snapshots.take(request, pair=pair, hold_reason=hold_reason, user=user)
        if pending is None:
            raise Busy(f"no snapshot could be cut within {CUT_SECONDS:.0f} s")
        return Taken(
            id=pending.id,
            repository=self._repository(),
            time_ns=pending.record.time_ns,
            roots=tuple(pending.state.roots),
        )

    async def _hold_refusal(self, wanted: Cut, caller: Caller, *, privileged: bool) -> str:
        """Return why a requested hold is refused; empty where it is granted, or none is requested."""
        if privileged or not wanted.hold_reason:
            return ""
        refusal = await self._holds.refusal(caller.uid)
        if refusal:
            log.warning("hold_refused", uid=caller.uid, reason=refusal)
        return refusal

    def _chosen(self, wanted: Sequence[str], caller: Caller, *, privileged: bool) -> list[RootSupervisor]:
        roots = self._roots()
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
            # By its text: what the kernel makes of it depends on links, which are not looked up here.
            if ".." in path.split("/"):
                raise UsageError(
                    f"{path} has .. in it, which may lead anywhere", hint="name the directory itself"
                )
            # With the slashes, so that /data2 is not taken for a part of /data.
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
    """Return the id of the training state.

    Raise UsageError for values that could not be read back from a snapshot.
    """
    try:
        training = SnapshotId.parse(wanted.training)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if (
        not wanted.repository.startswith("/")
        or "\0" in wanted.repository
        or not 0 <= wanted.time_ns < 1 << 63
    ):
        raise UsageError(
            "repository must be an absolute path without NUL, and time_ns at least 0 and below 2^63"
        )
    return str(training)


def _note(repository: str, roots: Sequence[RootSupervisor]) -> str:
    """Return a warning where the training's repository is in a captured root and stored twice so."""
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
