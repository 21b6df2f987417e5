"""Snapshots that a reader chooses from: those of the local repository, and those of the remotes.

Guarantees: the newest snapshot is the newest of both; a remote that cannot be read is an error where the local
repository has nothing, and a warning where it has something. The local repository is never made.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ciuic.errors import CiuicError, NotFound
from ciuic.repository import Repository, SnapshotInfo
from ciuic.training.format.reading import NothingGood, PassedOver
from ciuic.training.format.stored_files import ReadFrom
from ciuic.training.remote.copies import RemoteCandidate, RemoteTraining
from ciuic.training.writer.housekeeping import read_back

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig

log = logging.getLogger("ciuic")
HERE = ""
"""Name of a candidate's remote if it is in the local repository."""


class SnapshotSource:
    """Snapshots of one run, here and on its remotes. Connects when it is asked for what is not here."""

    def __init__(self, save_dir: Path, root: bytes, remotes: Sequence[RemoteConfig] = ()) -> None:
        """Open nothing yet.

        Args:
            save_dir: Local repository; need not exist where there are remotes.
            root: Path of the run in its snapshots.
            remotes: Remotes of the run.
        """
        self.save_dir = save_dir
        self._root = root
        self._remotes = tuple(remotes)
        self._training = RemoteTraining(self._remotes, root)

    @property
    def has_remotes(self) -> bool:
        """True if there are remotes."""
        return bool(self._remotes)

    def named(self, wanted: str) -> RemoteCandidate:
        """Return the snapshot with a tag (the newest that has it), an id or its beginning, or another name of one.

        The local repository comes first: a remote is asked for what it lacks.

        Raises:
            NotFound: There is no such snapshot.
            CiuicError: A remote cannot be read.
        """
        try:
            with Repository.open(self.save_dir) as repository:
                return RemoteCandidate(HERE, 0, 0, _named(repository, self._root, wanted))
        except NotFound:
            if not self._remotes:
                raise
        self._look_again()
        return self._training.named(lambda repository: _named(repository, self._root, wanted))

    def tagged(self, tag: str) -> RemoteCandidate:
        """Return the newest snapshot on a remote that has a tag; raises as `named`."""
        self._look_again()
        return self._training.named(lambda repository: _tagged(repository, self._root, tag))

    def newest_whole(self, passed_over: list[PassedOver]) -> RemoteCandidate:
        """Return the newest whole snapshot.

        One of the local repository is read through, because a damaged one must be found before it overwrites a
        part of the state. One of a remote is checked while it is loaded: reading it twice would cost twice.

        Args:
            passed_over: Takes newer snapshots that are damaged.

        Raises:
            NothingGood: There are snapshots, and none is whole.
            NotFound: There is none.
            CiuicError: There is none here, and a remote cannot be read.
        """
        here = self._here()
        if self._remotes:
            self._look_again()
            for one in self._elsewhere(bool(here)):
                if not here or one.time_ns > here[0].time_ns:
                    return one
                break
        with Repository.open(self.save_dir) as repository:
            for info in here:
                reason = read_back(repository, info.id)
                if not reason:
                    return RemoteCandidate(HERE, 0, info.time_ns, info.id)
                log.warning("ciuic: %s is damaged and passed over: %s", info.id, reason)
                passed_over.append(PassedOver(info.id, reason))
        if passed_over and (others := self._elsewhere(True)):
            log.warning("ciuic: no snapshot here is whole, so that a remote is read")
            return others[0]
        if passed_over:
            raise NothingGood(passed_over)
        raise NotFound(f"there is no checkpoint of {os.fsdecode(self._root)[1:]} in {self.save_dir}")

    def place(self, candidate: RemoteCandidate) -> ReadFrom:
        """Return where a candidate is read from, until `close` or the next search.

        Raises:
            CiuicError: The remote cannot be read.
        """
        return str(self.save_dir) if candidate.remote == HERE else self._training.opener(candidate)

    def close(self) -> None:
        """Close the remotes."""
        self._training.close()

    def _here(self) -> list[SnapshotInfo]:
        if self._remotes and not Repository.exists(self.save_dir):
            return []
        with Repository.open(self.save_dir) as repository:
            return repository.snapshots.list(root=self._root)

    def _elsewhere(self, may_fail: bool) -> list[RemoteCandidate]:
        """Return the snapshots on remotes, newest first; none where these cannot be read and need not."""
        try:
            return self._training.candidates()
        except CiuicError as error:
            if not may_fail:
                raise
            log.warning("ciuic: loading from this directory without looking at the remote: %s", error.message)
            return []

    def _look_again(self) -> None:
        """Forget what the remotes had: there may be newer snapshots."""
        self._training.close()
        self._training = RemoteTraining(self._remotes, self._root)


def _named(repository: Repository, root: bytes, wanted: str) -> str:
    # A checkpoint id is a tag; ids of snapshots and times come after.
    try:
        return _tagged(repository, root, wanted)
    except NotFound:
        return repository.snapshots.resolve(wanted)


def _tagged(repository: Repository, root: bytes, tag: str) -> str:
    found = repository.snapshots.list(root=root, tag=tag, limit=1)
    if not found:
        raise NotFound(f"there is no checkpoint {tag} of {os.fsdecode(root)[1:]}")
    return found[0].id
