"""Copies of a training's snapshots on its remotes: how far they are, waiting for one, and finding them from a new host.

`RemoteCopies` contacts nothing: it reads the record and the status of the processes that upload, which lie in the local
directory. Guarantees: a snapshot counts as stored only after its commit on the remote.

`RemoteTraining` reads the remote itself, for a host that has no snapshot. Guarantees: a remote that cannot be reached or
opened is an error, never "no snapshot"; what is loaded was checked like that of a local repository. Nothing is written
to a remote; what is read is cached in the user's cache directory (`ciuic.remote.reading.cache_directory`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.remote.upload_deadline import ExpectedState, announce
from ciuic.repository import Repository, SnapshotInfo
from ciuic.repository.snapshots import CommittedSnapshots
from ciuic.training.format.reading import check_unreadable
from ciuic.training.logs import quietly
from ciuic.training.remote.uploads import (
    LOG_NAME,
    UploadOrder,
    is_uploading,
    record_of,
    start_missing,
    state_dir,
)
from ciuic.types import SetMember, SnapshotId

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig


_POLL_SECONDS: Final = 0.1
# The writer process starts the upload after a save; where it has not by then, the one that waits does.
_START_SECONDS: Final = 10.0
# Time for a process that uploads to say what it expects: it may have to be started, and to open the remote.
_FORECAST_SECONDS: Final = 10.0


@dataclass(frozen=True)
class UploadBeforeEnd:
    """Content of a remote when a preempted program ends."""

    url: str
    snapshot: str
    """Newest snapshot of the training."""
    stored: bool
    """True if the remote has it."""
    expected: ExpectedState | None = None
    """What the process that uploads expected; None: it said nothing in time."""

    @property
    def text(self) -> str:
        """Describe it for the log."""
        if self.stored:
            part = ", which counts if every host of the set has stored its own"
            return f"{self.snapshot} is on {self.url}{part if self.expected and self.expected.in_set else ''}"
        head = f"{self.snapshot} is not on {self.url}"
        one = self.expected
        if one is None:
            return f"{head}: its upload was not waited for, because nothing was heard of it"
        if one.outcome == "left out":
            took = "" if one.needed_seconds is None else f", which would take {one.needed_seconds:.0f} s"
            head += f" and was not begun{took}"
        else:
            head += ", and was not stored in time"
        if not one.resume or (one.resume == self.snapshot):
            return f"{head}; what a resume from there starts at is what was there before"
        where = one.resume if one.step is None else f"step {one.step} ({one.resume})"
        return f"{head}; a resume from there starts at {where}"


@dataclass(frozen=True)
class RemoteProgress:
    """Progress of one remote, in `SnapshotManager.remote_status`."""

    url: str
    stored: int
    """Snapshots in the local directory that the remote has too."""
    behind: int
    """Snapshots that it still lacks."""
    behind_bytes: int
    """Bytes by which these let the local directory grow: about what is to be sent."""
    behind_seconds: float
    """Age of the oldest of them."""
    uploading: bool
    """True if a process uploads."""
    waits_for: str
    """Why nothing is sent, in words; empty while all is well."""
    bytes_per_second: float
    """Rate over the last ten seconds."""
    expected: tuple[ExpectedState, ...] = ()
    """What it will have of each training when this machine ends; empty where no end was announced."""


class RemoteCopies:
    """Copies on the remotes of one manager."""

    def __init__(self, save_dir: str, orders: Sequence[UploadOrder]) -> None:
        """Contact nothing."""
        self._save_dir = save_dir
        self.orders = tuple(orders)

    def wait(self, id_: str, timeout_seconds: float) -> bool:
        """Wait until every remote has stored a snapshot; return whether that came in time.

        A process that has died meanwhile is started again.
        """
        end = time.monotonic() + timeout_seconds
        missing_since = time.monotonic()
        repository_id = self._repository_id()
        while not all(self._has(order, repository_id, id_) for order in self.orders):
            now = time.monotonic()
            if now >= end:
                return False
            if all(self._is_uploading(order) for order in self.orders):
                missing_since = now
            elif now - missing_since > _START_SECONDS:
                missing_since = now
                self._start()
            time.sleep(min(_POLL_SECONDS, max(0.0, end - now)))
        return True

    def announce_end(self, cause: str, seconds: float) -> None:
        """Tell the processes that upload that this machine, or they, end in this time. What fails is logged."""
        if self.orders:
            with quietly("the upload could not be told of the end"):
                announce(state_dir(self._save_dir), seconds, cause)

    def wait_before_end(self, root: bytes, timeout_seconds: float) -> tuple[UploadBeforeEnd, ...]:
        """Wait for what the processes that upload promise or try to store before the announced end.

        Nothing is waited for that they have left out, nor for a process that says nothing.

        Returns:
            What each remote has; nothing if there is no snapshot.

        Raises:
            CiuicError: The repository cannot be read.
        """
        id_ = newest(self._save_dir, root)
        if id_ is None:
            return ()
        repository_id = self._repository_id()
        began = time.monotonic()
        end = began + timeout_seconds
        while True:
            now = time.monotonic()
            found = tuple(self._before_end(order, repository_id, id_, root) for order in self.orders)
            silent = now - began > _FORECAST_SECONDS
            if now >= end or all(
                one.stored
                or (silent if one.expected is None else self._is_settled(order, repository_id, one.expected))
                for order, one in zip(self.orders, found, strict=True)
            ):
                return found
            time.sleep(min(_POLL_SECONDS, end - now))

    def _before_end(self, order: UploadOrder, repository_id: str, id_: str, root: bytes) -> UploadBeforeEnd:
        # Only here: the module imports the store's client.
        from ciuic.remote.upload_status import read_status

        status = read_status(order.name, state_dir(self._save_dir))
        forecast = None if status is None else status.forecast
        expected = None if forecast is None else forecast.of(root)
        if expected is not None and expected.newest != id_:
            # Of before the last save.
            expected = None
        return UploadBeforeEnd(order.url, id_, self._has(order, repository_id, id_), expected)

    def _is_settled(self, order: UploadOrder, repository_id: str, expected: ExpectedState) -> bool:
        """Return whether nothing more comes: the newest was left out, and an older one in its place is there."""
        return expected.outcome == "left out" and (
            not expected.resume or self._has(order, repository_id, expected.resume)
        )

    def wait_newest(self, root: bytes, timeout_seconds: float) -> bool:
        """Wait until every remote has stored the newest snapshot of a training; return whether that came in time.

        Raises:
            ValueError: There is no remote.
        """
        if not self.orders:
            raise ValueError("there is no remote to wait for: pass remote= or a URL as save_dir")
        id_ = newest(self._save_dir, root)
        return id_ is None or self.wait(id_, timeout_seconds)

    def progress(self) -> list[RemoteProgress]:
        """Return how far each remote is.

        Raises:
            CiuicError: The repository cannot be read.
        """
        with Repository.open(self._save_dir) as repository:
            infos = repository.snapshots.list()
            return [self._progress_of(order, repository.id, infos) for order in self.orders]

    def _progress_of(
        self, order: UploadOrder, repository_id: str, infos: Sequence[SnapshotInfo]
    ) -> RemoteProgress:
        # Only here: the module imports the store's client.
        from ciuic.remote.upload_status import read_status

        record = record_of(self._save_dir, order, repository_id)
        stored = frozenset() if record is None else record.stored
        unwanted = frozenset() if record is None else record.passed_over
        lacking = [info for info in infos if info.id not in stored | unwanted]
        uploading = self._is_uploading(order)
        status = read_status(order.name, state_dir(self._save_dir)) if uploading else None
        waits_for = "" if status is None else status.waits_for
        if lacking and not uploading:
            log = state_dir(self._save_dir) / order.name / LOG_NAME
            waits_for = (
                f"no process uploads; the next save starts one, and what the last one said is in {log}"
            )
        oldest_ns = min((info.time_ns for info in lacking), default=0)
        return RemoteProgress(
            url=order.url,
            stored=sum(info.id in stored for info in infos),
            behind=len(lacking),
            behind_bytes=sum(info.new_bytes for info in lacking),
            behind_seconds=max(0.0, time.time() - oldest_ns / 1e9) if lacking else 0.0,
            uploading=uploading,
            waits_for=waits_for,
            bytes_per_second=0.0 if status is None else status.bytes_per_second,
            expected=() if status is None or status.forecast is None else status.forecast.states,
        )

    def _repository_id(self) -> str:
        with Repository.open(self._save_dir) as repository:
            return repository.id

    def _has(self, order: UploadOrder, repository_id: str, id_: str) -> bool:
        record = record_of(self._save_dir, order, repository_id)
        return record is not None and id_ in record.stored

    def _is_uploading(self, order: UploadOrder) -> bool:
        try:
            return is_uploading(self._save_dir, order.name)
        except OSError:
            return False

    def _start(self) -> None:
        with quietly("the upload cannot be started"):
            start_missing(self._save_dir, self.orders)


def newest(save_dir: str, root: bytes) -> str | None:
    """Return the id of the newest snapshot of a training; None if there is none.

    Raises:
        CiuicError: The repository cannot be read.
    """
    with Repository.open(save_dir) as repository:
        found = repository.snapshots.list(root=root)
    return found[0].id if found else None


class RemoteCandidate(NamedTuple):
    """Snapshot of the training on a remote."""

    remote: str
    """Name of the remote."""
    space: int
    """Number of the repository in the remote."""
    time_ns: int
    """Cut, by the clock of its host."""
    id: str
    """Name of the snapshot there; with the host where several hosts have the id."""


class RemoteTraining:
    """Snapshots of one training on its remotes; context manager. Connects when it is asked something.

    Every host's snapshots count, as long as the training has the same name.
    """

    def __init__(self, remotes: Sequence[RemoteConfig], root: bytes) -> None:
        """Contact nothing yet.

        Args:
            remotes: The remotes.
            root: Path of the training in its snapshots.
        """
        self._remotes = {remote.name: remote for remote in remotes}
        self._root = root
        self._closing = ExitStack()
        self._opened: dict[str, list[Repository]] = {}
        # Threads that read a state open a remote when the first of them needs it.
        self._opening = threading.Lock()
        self._candidates: list[RemoteCandidate] | None = None

    def candidates(self) -> list[RemoteCandidate]:
        """Return the snapshots of the training as of the first call, newest first.

        Raises:
            NoUsableSnapshot: All that the remotes have of it cannot be read.
            CiuicError: A remote cannot be reached or opened, so that nobody knows what is there.
        """
        if self._candidates is None:
            repositories = [
                (name, number, repository.snapshots)
                for name in self._remotes
                for number, repository in enumerate(self._repositories(name))
            ]
            found = [
                RemoteCandidate(name, number, info.time_ns, str(info.id))
                for name, number, snapshots in repositories
                for info in snapshots.list(root=self._root)
            ]
            if not found:
                for _, _, snapshots in repositories:
                    check_unreadable(snapshots, partial(self._is_own, snapshots))
            self._candidates = sorted(found, key=lambda one: (-one.time_ns, one))
        return self._candidates

    def _is_own(self, snapshots: CommittedSnapshots, id_: str) -> bool | None:
        """Tell by the name of its manifest whether a snapshot is one of the training; None: that does not say."""
        from ciuic.remote.object_names import as_label
        from ciuic.remote.reading.remote_snapshots import RemoteSnapshots

        label = snapshots.label(id_) if isinstance(snapshots, RemoteSnapshots) else None
        return None if label is None else label.job == as_label(os.fsdecode(self._root).strip("/"))

    @property
    def names(self) -> Collection[str]:
        """Names of the configured remotes, opened or not."""
        return self._remotes.keys()

    def member_of(self, candidate: RemoteCandidate) -> SetMember | None:
        """Return the place of a candidate in a set; None also of one that cannot be read."""
        try:
            snapshots = self._repositories(candidate.remote)[candidate.space].snapshots
            return snapshots.load(SnapshotId(candidate.id)).set_member
        except (NotFound, Damaged):
            return None

    def named(self, find: Callable[[Repository], str]) -> RemoteCandidate:
        """Return the newest of the snapshots that ``find`` chooses, in each repository of each remote.

        Raises:
            NotFound: It finds none.
            CiuicError: A remote cannot be reached or opened.
        """
        found: list[RemoteCandidate] = []
        lacking: NotFound | None = None
        for name in self._remotes:
            for number, repository in enumerate(self._repositories(name)):
                try:
                    id_ = SnapshotId(find(repository))
                except NotFound as error:
                    lacking = error
                    continue
                time_ns = repository.snapshots.load(id_).time_ns
                found.append(RemoteCandidate(name, number, time_ns, str(id_)))
        if not found:
            raise lacking or NotFound("there is no remote")
        return max(found, key=lambda one: one.time_ns)

    def opener(self, candidate: RemoteCandidate) -> Callable[[], Repository]:
        """Return what opens the repository of a candidate once more, for any thread, until this is closed.

        Raises:
            CiuicError: The remote cannot be reached or opened.
        """
        return self._repositories(candidate.remote)[candidate.space].reopen

    def close(self) -> None:
        """Close the remotes."""
        self._opened.clear()
        self._closing.close()

    def __enter__(self) -> RemoteTraining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _repositories(self, name: str) -> list[Repository]:
        with self._opening:
            if name not in self._opened:
                self._opened[name] = self._open(name)
            return self._opened[name]

    def _open(self, name: str) -> list[Repository]:
        # Only here: a training that has its snapshots needs no client of a store.
        from ciuic.remote.access import configured_secrets, configured_settings
        from ciuic.remote.reading.opening import open_remote_repository

        remote = self._remotes[name]
        try:
            opened = open_remote_repository(
                remote.url, configured_settings(remote), configured_secrets(remote)
            )
        except CiuicError as error:
            error.message = (
                f"cannot tell whether there is something to resume at {remote.url}: {error.message}"
            )
            error.args = (error.message,)
            raise
        self._closing.callback(opened.close)
        return list(opened.repositories)
