"""Snapshots of a training on its remotes, for a host that has none of them.

Guarantees: a remote that cannot be reached or opened is an error, never "no snapshot"; what is loaded was checked
like that of a local repository. Nothing is written to a remote; what is read is cached in the user's cache
directory (ciuic.remote.reading.cache_directory).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from ciuic.errors import CiuicError, NotFound
from ciuic.repository import Repository
from ciuic.types import SnapshotId

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig


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
        self._candidates: list[RemoteCandidate] | None = None

    def candidates(self) -> list[RemoteCandidate]:
        """Return the snapshots of the training as of the first call, newest first.

        Raises:
            CiuicError: A remote cannot be reached or opened, so that nobody knows what is there.
        """
        if self._candidates is None:
            found = [
                RemoteCandidate(name, number, info.time_ns, str(info.id))
                for name in self._remotes
                for number, repository in enumerate(self._repositories(name))
                for info in repository.snapshots.list(root=self._root)
            ]
            self._candidates = sorted(found, key=lambda one: (-one.time_ns, one))
        return self._candidates

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
        if name not in self._opened:
            # Only here: a training that has its snapshots needs no client of a store.
            from ciuic.remote.access import configured_secrets
            from ciuic.remote.reading.opening import open_remote_repository
            from ciuic.training.remote.joining import settings_of

            remote = self._remotes[name]
            try:
                opened = open_remote_repository(remote.url, settings_of(remote), configured_secrets(remote))
            except CiuicError as error:
                error.message = (
                    f"cannot tell whether there is something to resume at {remote.url}: {error.message}"
                )
                error.args = (error.message,)
                raise
            self._closing.callback(opened.close)
            self._opened[name] = list(opened.repositories)
        return self._opened[name]
