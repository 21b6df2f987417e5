"""Directories of the destination while something below them is in work.

Guarantees: a directory gets its attributes, and its times, when everything below it is done, and is synced after that,
so that what was renamed into it is durable. A new one is closed to everybody else until then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from ciuic.linked_path import LinkedPath
from ciuic.lookup import join
from ciuic.restore import attributes
from ciuic.restore.attributes import Xattrs
from ciuic.restore.destination import new_temporary_name, open_directory, rename_new
from ciuic.restore.private_dir import PrivateDir, is_shared, make_private_dir
from ciuic.types import Entry

_SYNCED_AT_ONCE = 128
NOT_THERE = -1
"""The descriptor of a directory that a dry run would make."""

_preparing = threading.Lock()
"""Guards `Folder._private`: several threads may be the first to need it."""

WhenDone = Callable[["Folder", list[str]], None]


class Folder:
    """A directory in work. Counting is guarded by one lock for all (Pool.changed)."""

    def __init__(
        self,
        fd: int,
        path: bytes,
        source_path: bytes,
        *,
        parent: Folder | None = None,
        fresh: bool = False,
    ) -> None:
        self.fd = fd
        """NOT_THERE in a dry run, and when it is done."""
        self._path: LinkedPath = LinkedPath(path, parent._path if parent is not None else None)
        self._source_path: LinkedPath = LinkedPath(
            source_path, parent._source_path if parent is not None else None
        )
        self.parent = parent
        self.fresh = fresh
        """Made by this run: nothing can be in the way in it."""
        self.entry: Entry | None = None
        """What it becomes when it is done; None leaves it as it is."""
        self.xattrs: Xattrs = ()
        self._private: PrivateDir | None = None
        self._with_private: set[Folder] = set() if parent is None else parent._with_private
        """All below the same top that have a private directory now."""
        self._pending = 1
        if parent is not None:
            parent.hold()

    @property
    def path(self) -> bytes:
        """Absolute."""
        return bytes(self._path)

    @property
    def source_path(self) -> bytes:
        """Its path as it was at the snapshot."""
        return bytes(self._source_path)

    @classmethod
    def make(cls, parent: Folder, name: bytes, source_path: bytes, *, run: str, dry_run: bool) -> Folder:
        """A new directory, 0700 until it is done. OSError."""
        path = join(parent.path, name)
        if dry_run:
            return cls(NOT_THERE, path, source_path, parent=parent, fresh=True)
        place = parent.workplace(run)
        if place == parent.fd:
            os.mkdir(name, 0o700, dir_fd=place)
            return cls(open_directory(place, name), path, source_path, parent=parent, fresh=True)
        # Another user may replace names in the parent: opened by its final name it could be a directory of somebody else, who
        # would lose it to the recorded owner.
        temporary = new_temporary_name(run)
        os.mkdir(temporary, 0o700, dir_fd=place)
        made = open_directory(place, temporary)
        try:
            rename_new(place, temporary, parent.fd, name)
        except BaseException:
            os.close(made)
            os.rmdir(temporary, dir_fd=place)
            raise
        return cls(made, path, source_path, parent=parent, fresh=True)

    @classmethod
    def enter(cls, parent: Folder, name: bytes, source_path: bytes) -> Folder:
        """One that is there. NotADirectoryError for anything else, a symbolic link included."""
        return cls(open_directory(parent.fd, name), join(parent.path, name), source_path, parent=parent)

    def workplace(self, run: str) -> int:
        """Descriptor of the directory in which new things get ready before they are renamed into this one. OSError.

        This one itself, unless somebody else may replace names in it.
        """
        if self.fresh:
            return self.fd
        with _preparing:
            if self._private is None:
                if not is_shared(self.fd):
                    return self.fd
                self._private = make_private_dir(self.fd, run)
                self._with_private.add(self)
            return self._private.fd

    def leave_workplace(self) -> None:
        """Remove the directory for unfinished things. None of them may be in work."""
        private, self._private = self._private, None
        if private is not None:
            self._with_private.discard(self)
            private.remove()

    def leave_all_workplaces(self) -> None:
        """`leave_workplace` for all directories below this one, after a run that was cut short."""
        for folder in list(self._with_private):
            folder.leave_workplace()

    def hold(self) -> None:
        """Something below begins."""
        self._pending += 1

    def release(self, lock: AbstractContextManager[object], syncer: Syncer, finished: WhenDone) -> None:
        """Something below is done, or the walk through it; after the last, ``finished`` gets what went wrong.

        Takes the lock, and does not hold it while the directory is synced.
        """
        folder: Folder | None = self
        while folder is not None and folder._is_last(lock):
            problems = folder._settle(syncer)
            with lock:
                finished(folder, problems)
            folder = folder.parent  # a loop, because directories may be thousands deep

    def drop(self) -> None:
        """Closes it and leaves it as it is."""
        self.leave_workplace()
        fd, self.fd = self.fd, NOT_THERE
        if fd != NOT_THERE:
            os.close(fd)

    def __del__(self) -> None:
        self.drop()  # a run that was cut short

    def _is_last(self, lock: AbstractContextManager[object]) -> bool:
        with lock:
            self._pending -= 1
            return not self._pending

    def _settle(self, syncer: Syncer) -> list[str]:
        """Gives it its attributes and hands it over to be synced; returns what went wrong."""
        problems: list[str] = []
        if self.fd == NOT_THERE:
            return problems
        try:
            self.leave_workplace()  # first, because it changes the directory's time
            if self.entry is not None:
                problems += attributes.apply(self.fd, os.fstat(self.fd), self.entry, self.xattrs)
        except OSError as error:
            problems.append(error.strerror or str(error))
        fd, self.fd = self.fd, NOT_THERE
        syncer.add(fd, self.path)
        return problems


class Syncer:
    """Syncs directories, many at once: the first of them writes the file system's journal, and the others find it written
    (two thousand directories took 22 seconds one by one, as each waited for a write of its own).
    """

    def __init__(self, failed: Callable[[bytes, OSError], None]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, bytes]] = []

    def add(self, fd: int, path: bytes) -> None:
        """Takes over the descriptor."""
        with self._lock:
            self._waiting.append((fd, path))
            full = len(self._waiting) >= _SYNCED_AT_ONCE
        if full:
            self.flush()

    def flush(self) -> None:
        """On return all that were added before are durable, or were told to have failed."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for fd, path in waiting:
            try:
                os.fsync(fd)
            except OSError as error:
                self._failed(path, error)
            finally:
                os.close(fd)
