"""Repository operations of the daemon process itself. All of them block; call them in threads.

Guarantees: nothing here holds the repository open between calls or takes its lock, except to create a
repository. Captures and upkeep are processes of their own and open it for themselves. Whether upkeep has
something to do is decided from the catalogue alone, and the plan is that of `ciuic.maintenance.prune`, or
upkeep would be started in vain, or not at all.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import structlog

# For `undoes_newest_change`, which imports it when it needs it: a daemon imports nothing weeks after its start, when another version
# may lie on the disk.
import ciuic.compare.diff  # noqa: F401
from ciuic.compare.restore_records import undoes_newest_change
from ciuic.config.repository_mark import RepositoryMark, absent_mount_point, mark_of, read_mark, write_mark
from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.protocol.control_types import RemoteStatus, RepositoryStatus, SnapshotSummary, rfc3339
from ciuic.protocol.last_drill import read_last_drill
from ciuic.protocol.stored_remotely import RemotePlace, remote_lag, remotes_done
from ciuic.repository import Repository, promised
from ciuic.repository.promised import Promise
from ciuic.repository.trust import require_own
from ciuic.retention import MinFree, RetentionPolicy, plan_retention, snapshots_having
from ciuic.system import mountinfo
from ciuic.system.disk_space import measurable, unstored_floor_bytes
from ciuic.types import STATE_TAGS, TAG_PARTIAL, SnapshotId, is_safety

# Newest snapshots that are searched for an epoch: more epochs than that are never pending.
_RECENT_SNAPSHOTS = 32
log = structlog.get_logger(__name__)


class UpkeepRules(NamedTuple):
    """Facts that decide which snapshots stay."""

    policy: RetentionPolicy
    min_free: MinFree | None = None
    remotes: tuple[RemotePlace, ...] = ()
    """Remotes to which snapshots go."""
    reserve_bytes: int = 0
    """Free space that captures leave to others."""


class UpkeepNeed(NamedTuple):
    """Answer to the question if upkeep has something to do."""

    is_due: bool
    """Some snapshot is kept by no rule, or free space is below the floor of snapshots that may yield."""
    unstored: int = 0
    """Number of snapshots that stay because a remote has not stored them."""


def _upkeep_need(
    repository: Repository, rules: UpkeepRules, free_bytes: int, file_system_bytes: int, *, now_ns: int
) -> UpkeepNeed:
    """Return whether upkeep has something to do.

    Args:
        repository: the open repository.
        rules: what decides.
        free_bytes: free space of its file system.
        file_system_bytes: size of its file system.
        now_ns: the current time.
    """
    infos = repository.snapshots.list()
    states = {
        info.id
        for info in infos
        if not STATE_TAGS.isdisjoint(info.tags) and repository.snapshots.load(info.id).is_state
    }
    lacking = [repository.snapshots.load(info.id) for info in infos if TAG_PARTIAL in info.tags]
    plan = plan_retention(
        infos,
        rules.policy,
        now_ns=now_ns,
        states=states,
        having=snapshots_having(
            {info.id: info.roots for info in infos},
            [root.path for snapshot in lacking for root in snapshot.left_out],
        ),
        undoes=partial(undoes_newest_change, repository, infos),
        remotes=remotes_done(rules.remotes, repository.id, now_ns=now_ns).done,
    )
    floor_bytes = unstored_floor_bytes(rules.min_free, file_system_bytes, rules.reserve_bytes)
    # Without min_free, only snapshots yield that nothing but a remote keeps.
    may_yield = rules.min_free is not None or any(
        decision.remotes and not decision.local_reasons for decision in plan.kept
    )
    return UpkeepNeed(
        bool(plan.removed) or (may_yield and free_bytes < floor_bytes),
        sum(bool(decision.remotes) for decision in plan.kept),
    )


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Raise errors of the disk and of the index as CiuicError with a message for the operator."""
    try:
        yield
    except OSError as error:
        raise CiuicError(
            f"the repository {path} cannot be used: {error.strerror or error}",
            hint="ciuic doctor looks at its disk",
        ) from error
    except sqlite3.Error as error:
        raise CiuicError(
            f"the index of the repository {path} cannot be read: {error}", hint="ciuic check --repair"
        ) from error


class LastSnapshot(Protocol):
    """Facts of a committed snapshot."""

    @property
    def id(self) -> SnapshotId: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def new_bytes(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def tags(self) -> tuple[str, ...]: ...


_MEASURES: Final = 3
"""Measurements after which a repository that grows all the time is shown as it was last."""


class _Room(NamedTuple):
    """Space of a file system; zeros where it is not known."""

    # Free space for an ordinary process (f_bavail).
    free_bytes: int = 0
    used_bytes: int = 0
    total_bytes: int = 0


class Store:
    """The repository at `path`; None when the configuration names no path."""

    def __init__(
        self, path: Path | None, *, block_bytes: int, trusted: bool = False, remote: str = ""
    ) -> None:
        """Prepare to use the repository; nothing is opened.

        Args:
            path: path of the repository; None: none is configured.
            block_bytes: block size of a repository that is created.
            trusted: the repository may belong to another user.
            remote: name of the remote whose identity a new repository should have; empty for none.
        """
        self.path = path
        self.remote = remote
        self._made_apart = False
        self.trusted = trusted
        self._block_bytes = block_bytes
        # Held while the repository is created, so that two threads do not both create it.
        self._making = threading.Lock()
        # Snapshots that begin together write marks into the same roots.
        self._telling = threading.Lock()
        # Whether the repository was there in this daemon's life.
        self._seen = False
        # Marks of the repository that were found in the roots last.
        self._marks: list[RepositoryMark] = []

    @property
    def is_ready(self) -> bool:
        """True once `ensure` has found or made the repository."""
        return self._seen

    def ensure(self, root_fds: Iterable[int] = ()) -> None:
        """Create the repository if there never was one.

        Args:
            root_fds: backing directories of roots, which have a mark of where their repository was and get
                one of where it is.

        Raises:
            NotFound: the repository was there and is gone, or its disk is not mounted.
            CiuicError: it cannot be used.
        """
        path, root_fds = self._known_path(), tuple(root_fds)
        self._marks = [mark for fd in root_fds if (mark := read_mark(fd)) is not None]
        # The daemon's start and the first snapshot come here at the same time, and only one of them may
        # create the repository.
        with self._making, _in_words(path):
            require_own(path, trusted=self.trusted)
            if not Repository.exists(path):
                refusal = self._refusal(path)
                if refusal is not None:
                    raise refusal
                if any(mark.path == os.fsencode(path) for mark in self._marks):
                    log.warning("repository_gone_and_made_anew", path=str(path))
                Repository.create(path, block_size=self._block_bytes, refuse_foreign=not self.trusted).close()
                if self.remote:
                    # This process has no network to ask the remote.
                    log.warning("repository_made_apart", path=str(path), remote=self.remote)
                    self._made_apart = True
        # From now on a missing repository is an error and not a first start.
        self._seen = True
        self._tell(path, root_fds)

    def _refusal(self, path: Path) -> NotFound | None:
        """Return why no repository may be created where there is none; None when one may."""
        mount_point = absent_mount_point(path, self._marks, mountinfo.read())
        if mount_point is not None:
            return NotFound(
                f"the repository {path} is on the file system that belongs at {os.fsdecode(mount_point)}, "
                "which is not mounted",
                hint="mount it, and snapshots go on; to begin a new repository instead: "
                "ciuic protect --new-repository ROOT",
            )
        if self._seen:
            # Most likely its disk was unmounted, and a new repository would fill the disk below the mount
            # point.
            return NotFound(
                f"the repository {path} was there and is gone",
                hint="mount its disk again, or move it back; to begin a new repository there, restart the daemon",
            )
        return None

    def _tell(self, path: Path, root_fds: Iterable[int]) -> None:
        """Write the mark into the roots.

        A root that cannot store it (a full disk) is no reason to go without a snapshot.
        """
        try:
            with self._open() as repository:
                mark = mark_of(path, repository.id, mountinfo.read())
        except CiuicError:
            return  # the operation that needs the repository will report it
        for fd in root_fds:
            try:
                with self._telling:
                    write_mark(fd, mark)
            except OSError as error:
                log.info("repository_mark_not_written", error=str(error))

    def new_id(self, taken: frozenset[str]) -> SnapshotId:
        """Return an id that neither a committed snapshot nor one of `taken` has."""
        with self._open() as repository:
            return repository.snapshots.new_id(taken)

    def has_all(self, roots: Iterable[str]) -> bool:
        """Return whether each of the roots is in some committed snapshot."""
        with self._open() as repository:
            return all(repository.snapshots.list(root=os.fsencode(root), limit=1) for root in roots)

    def latest(self) -> LastSnapshot | None:
        """Return the newest committed snapshot except safety snapshots.

        Return None when there is none, or no repository yet.
        """
        try:
            with self._open() as repository:
                infos = repository.snapshots.newest_first()
                return next((info for info in infos if not is_safety(info.tags, info.message)), None)
        except NotFound:
            return None

    def latest_of(self, roots: Iterable[str]) -> dict[str, LastSnapshot | None]:
        """Return the newest committed snapshot of each root, of any kind; None for a root that has none."""
        found: dict[str, LastSnapshot | None] = dict.fromkeys(roots)
        if self.path is None or not found:
            return found
        wanted = {os.fsencode(root): root for root in found}
        try:
            with self._open() as repository:
                for info in repository.snapshots.newest_first():
                    for root in wanted.keys() & set(info.roots):
                        found[wanted.pop(root)] = info
                    if not wanted:
                        break
        except NotFound:
            pass  # no repository yet
        return found

    def block_bytes(self) -> int:
        """Return the block size that workers must track with: the repository's, or that of a new one."""
        try:
            with self._open() as repository:
                return repository.block_size
        except CiuicError:
            return self._block_bytes

    def find(self, snapshot_id: str) -> LastSnapshot | None:
        """Return a committed snapshot by its full id."""
        try:
            with self._open() as repository:
                return repository.snapshots.info(SnapshotId.parse(snapshot_id))
        except (NotFound, ValueError):
            return None

    def known(self, ids: frozenset[str]) -> frozenset[str]:
        """Return the ids that are committed and have not been removed."""
        try:
            with self._open() as repository:
                return ids & repository.snapshots.names()
        except NotFound:
            return frozenset()

    def known_of(self, ids: frozenset[str], roots: frozenset[str]) -> frozenset[str]:
        """Return the committed snapshots of `ids`, and all that have one of these roots.

        The time that it takes does not depend on ids that an unprivileged caller may not know of.
        """
        if not ids and not roots:
            return frozenset()
        try:
            with self._open() as repository:
                found = ids & repository.snapshots.names()
                wanted = {os.fsencode(root) for root in roots}
                if not wanted:
                    return found
                infos = repository.snapshots.list()
                return found | {str(info.id) for info in infos if not wanted.isdisjoint(info.roots)}
        except NotFound:
            return frozenset()

    def held_for(self, uid: int) -> frozenset[str]:
        """Return the committed snapshots that are held for an ordinary user."""
        try:
            with self._open() as repository:
                held = [info.id for info in repository.snapshots.list() if info.held]
                # The user is in the marks file of a snapshot and not in the catalogue, so only held ones are
                # loaded.
                return frozenset(str(id_) for id_ in held if _is_held_for(repository, id_, uid))
        except NotFound:
            return frozenset()

    def promise(self, promise: Promise) -> None:
        """Record in the repository that an id was given out. May raise CiuicError and OSError."""
        promised.record_promise(self._own_path(), promise)

    def keep_promise(self, snapshot_id: str) -> None:
        """Remove the record of a snapshot that is committed. May raise CiuicError and OSError."""
        promised.remove_promise(self._own_path(), snapshot_id)

    def lose(self, promise: Promise) -> None:
        """Record why a snapshot will never exist; durable on return. May raise CiuicError and OSError."""
        promised.record_loss(self._own_path(), promise)

    def lost(self, snapshot_id: str) -> Promise | None:
        """Return the record of a snapshot that was given up; None for every other id."""
        if self.path is None:
            return None
        return next((one for one in promised.lost(self.path, ()) if one.id == snapshot_id), None)

    def open_promises(self, known: Collection[str]) -> list[Promise]:
        """Return promises that are neither kept nor recorded as lost, without those of `known`.

        Removes kept promises.
        """
        found = []
        with self._open() as repository:
            names = repository.snapshots.names()
            for promise in promised.promises(repository.path):
                # A daemon that was killed between the commit and the removal left it.
                if promise.id in names:
                    promised.remove_promise(repository.path, promise.id)
                elif not promise.reason and promise.id not in known:
                    found.append(promise)
        return found

    def _own_path(self) -> Path:
        path = self._known_path()
        require_own(path, trusted=self.trusted)
        return path

    def snapshot_of_epoch(self, root: str, session: str, epoch: int) -> LastSnapshot | None:
        """Return the committed snapshot that has this epoch of this session; None when there is none."""
        wanted = (os.fsencode(root), session, epoch)
        try:
            with self._open() as repository:
                for info in repository.snapshots.list(root=wanted[0], limit=_RECENT_SNAPSHOTS):
                    try:
                        records = repository.snapshots.load(info.id).roots
                    # Another snapshot may have the epoch.
                    except Damaged:
                        continue
                    if any((record.path, record.session, record.epoch) == wanted for record in records):
                        return info
        except NotFound:
            return None
        return None

    def roots_of(self, snapshot_id: str) -> frozenset[str]:
        """Return the roots of a committed snapshot. May raise NotFound and Damaged."""
        with self._open() as repository:
            snapshot = repository.snapshots.load(SnapshotId.parse(snapshot_id))
            return frozenset(os.fsdecode(root.path) for root in snapshot.roots)

    def upkeep_need(self, rules: UpkeepRules, *, now_ns: int) -> UpkeepNeed:
        """Return whether upkeep has something to do. May raise CiuicError."""
        try:
            with self._open() as repository:
                room = self._room(self._known_path())
                return _upkeep_need(repository, rules, room.free_bytes, room.total_bytes, now_ns=now_ns)
        except NotFound:
            return UpkeepNeed(is_due=False)

    def remotes(self, remotes: Sequence[RemotePlace], *, now_ns: int) -> list[RemoteStatus]:
        """Return how far each remote is behind; none while there is no repository. May raise CiuicError."""
        if not remotes or self.path is None:
            return []
        try:
            with self._open() as repository:
                infos = repository.snapshots.list()
                lags = {one.name: remote_lag(one, repository.id, infos, now_ns=now_ns) for one in remotes}
        except NotFound:
            return []
        drills = {name: read_last_drill(name) for name in lags}
        return [
            RemoteStatus(
                name=name,
                snapshots=lag.snapshots,
                size_bytes=lag.size_bytes,
                seconds=lag.seconds,
                stored=lag.stored,
                newest=lag.newest,
                problem=lag.flaw,
                last_drill="" if (drill := drills[name]) is None else rfc3339(drill.time_ns),
                drill_ok=drill is not None and drill.is_good,
            )
            for name, lag in lags.items()
        ]

    def status(self) -> RepositoryStatus:
        """Return size and free space.

        A figure that cannot be had stays zero: a status must not fail because the store does.
        """
        if self.path is None:
            return RepositoryStatus()
        document = RepositoryStatus(path=str(self.path))
        room = None
        try:
            with self._open() as repository:
                document.exists = True
                # Both of one moment: what a capture gave back in between would count as another's use of the disk.
                for _ in range(_MEASURES):
                    document.size_bytes = repository.stored_bytes()
                    room = self._room(self.path)
                    if repository.stored_bytes() == document.size_bytes:
                        break
                document.snapshots = len(repository.snapshots.ids())
        except CiuicError:
            # A repository that cannot be read is not a missing one.
            document.exists = Repository.exists(self.path)
        if document.exists and self._made_apart:
            document.made_apart_from = self.remote
        if not document.exists and (refusal := self._refusal(self.path)) is not None:
            document.missing, document.missing_hint = refusal.message, refusal.hint
            # What is measured there now is the disk below the mount point.
            return document
        document.free_bytes, document.used_bytes, document.total_bytes = room or self._room(self.path)
        return document

    @staticmethod
    def _room(path: Path) -> _Room:
        try:
            facts = os.statvfs(measurable(path))
        except OSError:
            return _Room()
        unit = facts.f_frsize
        return _Room(facts.f_bavail * unit, (facts.f_blocks - facts.f_bfree) * unit, facts.f_blocks * unit)

    def _known_path(self) -> Path:
        if self.path is None:
            raise CiuicError(
                "no repository is configured", hint="protect a directory, or set [repository] path"
            )
        return self.path

    @contextmanager
    def _open(self) -> Iterator[Repository]:
        path = self._known_path()
        require_own(path, trusted=self.trusted)
        with _in_words(path), Repository.open(path) as repository:
            self._seen = True
            yield repository


def _is_held_for(repository: Repository, id_: SnapshotId, uid: int) -> bool:
    try:
        return repository.snapshots.load(id_).hold_uid == uid
    except (Damaged, NotFound):
        return False


def summary(info: LastSnapshot) -> SnapshotSummary:
    """Return the snapshot as the status document shows it."""
    return SnapshotSummary(
        id=str(info.id),
        time=rfc3339(info.time_ns),
        new_bytes=info.new_bytes,
        size_bytes=info.size_bytes,
        partial=TAG_PARTIAL in info.tags,
    )
