"""Directories of the destination: those that lead to each target, found or restored, and those being restored, held open.

Guarantees: an original path is reached from the root's own path without following a symbolic link, and missing directories on
the way are restored with the attributes that they had. A destination that the caller chose is opened as the caller wrote it,
links included unless they could redirect the restore (destination.py). A directory gets its attributes and times when
everything below it is done, and is synced after that, so that what was renamed into it is durable. Until then no other user
may enter a new one.

Where another user may rename names in a directory, a name that was just created can lead to something else a moment later. What
is created there by name (a pipe, a symbolic link, a directory) could not be opened reliably, and whatever was put in its place
would get the recorded owner. New files are therefore created in a private directory of mode 0700 that only the caller enters,
get their attributes there, and are renamed from there. Where the file system keeps no owners (FAT, SMB, NFS that maps root to
nobody), they are created in the shared directory itself.
"""

from __future__ import annotations

import errno
import os
import posixpath
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import msgspec

from ciuic.errors import CiuicError, NotPermitted, UsageError
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import Located, find, is_within, join, normalise
from ciuic.restore import attributes
from ciuic.restore.attributes import Xattrs
from ciuic.restore.destination import (
    is_append_only,
    lift_mode,
    may_lift,
    new_temporary_name,
    open_directory,
    open_way,
    proc_path,
    rename_new,
)
from ciuic.restore.journal import new_run
from ciuic.restore.model import RestoreTarget
from ciuic.system.disk import NEW_FILE, LinkedPath
from ciuic.system.mountinfo import MountBorders
from ciuic.types import Entry, Snapshot

_NOT_OWNER = stat.S_IRWXG | stat.S_IRWXO


class PrivateDir(msgspec.Struct, frozen=True):
    """A directory for unfinished files; closed by `remove`."""

    shared: int
    """Descriptor of the directory that it is in."""
    name: bytes
    """Name in the shared directory; empty if the file system keeps no owners and `fd` is the shared directory."""
    fd: int

    def remove(self) -> None:
        """Close it, and remove it if it is empty."""
        os.close(self.fd)
        if self.name:
            # Its name leads elsewhere now, or something in it could not be removed.
            with suppress(OSError):
                os.rmdir(self.name, dir_fd=self.shared)


def is_shared(folder: int) -> bool:
    """Return whether a user other than root and the caller may replace names in this directory.

    An access ACL that lets others write shows in the group bits, which are its mask (acl(5)).
    """
    st = os.fstat(folder)
    return st.st_uid not in (0, os.geteuid()) or bool(st.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _make_private_dir(shared: int, run: str) -> PrivateDir:
    """Create a private directory in a shared one. OSError, also when its name was replaced meanwhile."""
    name = new_temporary_name(run)
    os.mkdir(name, 0o700, dir_fd=shared)
    # The name may lead elsewhere by now, so what was opened is checked by its descriptor.
    fd = open_directory(shared, name)
    try:
        if _is_private(os.fstat(fd)):
            # Another directory of the caller, moved here meanwhile, is as private, but its content must stay.
            if os.listdir(proc_path(fd)):
                raise OSError(errno.EBUSY, "another directory has replaced the one just created")
            return PrivateDir(shared, name, fd)
        # Not private on a file system that keeps owners: another user has exchanged the directory.
        if _has_owners(shared, run):
            raise OSError(errno.EBUSY, "another directory has replaced the one just created")
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    with suppress(OSError):
        os.rmdir(name, dir_fd=shared)
    return PrivateDir(shared, b"", os.dup(shared))


def _is_private(st: os.stat_result) -> bool:
    return st.st_uid == os.geteuid() and not st.st_mode & _NOT_OWNER


def _has_owners(shared: int, run: str) -> bool:
    """Return whether the file system keeps the owner and mode of new files."""
    # Tested with a regular file: O_EXCL returns the descriptor of the file just created, which no other user can replace.
    name = new_temporary_name(run)
    fd = os.open(name, NEW_FILE, 0o600, dir_fd=shared)
    try:
        return _is_private(os.fstat(fd))
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(name, dir_fd=shared)


# Each directory that waits has a descriptor open.
_MAX_UNSYNCED = 128
NOT_THERE = -1
"""Stands for the descriptor of a directory that a dry run would create."""

# Guards `Folder._private`: several threads may be the first to need it. One lock for all directories, because it is rarely needed.
_preparing = threading.Lock()

WhenDone = Callable[["Folder", list[str]], None]


class Folder:
    """A directory and the number of its users: the walk, and everything below that is being restored.

    The count is guarded by one lock for all directories (Pool.changed).
    """

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
        """Descriptor; NOT_THERE in a dry run, and after the end."""
        self._path: LinkedPath = LinkedPath(path, parent._path if parent is not None else None)
        self._source_path: LinkedPath = LinkedPath(
            source_path, parent._source_path if parent is not None else None
        )
        self.parent = parent
        self.fresh = fresh
        """Created by this run, so nothing can be in the way in it."""
        self.entry: Entry | None = None
        """Attributes that it gets at the end; None leaves them as they are."""
        self.xattrs: Xattrs = ()
        self._borders: MountBorders | None = None
        self._lifted: int | None = None
        """Mode to put back at the end, unless the directory gets the snapshot's."""
        self._private: PrivateDir | None = None
        self._append_only: bool | None = None
        self._with_private: set[Folder] = set() if parent is None else parent._with_private
        """All directories below the same top that have a private directory now."""
        self._pending = 1
        if parent is not None:
            parent.hold()

    @property
    def path(self) -> bytes:
        """Absolute path in the destination."""
        return bytes(self._path)

    @property
    def source_path(self) -> bytes:
        """Absolute path at the snapshot."""
        return bytes(self._source_path)

    def lift(self) -> None:
        """Let the caller change names in its own directory until the end, whatever its mode says. OSError."""
        if not self.fresh and self.fd != NOT_THERE:
            self._lifted = lift_mode(self.fd)

    def leads_away(self, name: bytes) -> bool:
        """Return whether another mount lies at a name of this directory."""
        # Nothing is mounted in a directory that this run has made: no other user may enter it before the end.
        if self.fresh or self.fd == NOT_THERE:
            return False
        if self._borders is None:
            self._borders = MountBorders(self.fd)
        return self._borders.at(name)

    @classmethod
    def make(cls, parent: Folder, name: bytes, source_path: bytes, *, run: str, dry_run: bool) -> Folder:
        """Create a directory, with mode 0700 until the end. OSError."""
        path = join(parent.path, name)
        if dry_run:
            return cls(NOT_THERE, path, source_path, parent=parent, fresh=True)
        place = parent.workplace(run)
        if place == parent.fd:
            os.mkdir(name, 0o700, dir_fd=place)
            return cls(open_directory(place, name), path, source_path, parent=parent, fresh=True)
        # Another user may replace names in the parent. Opened by its final name, it could be another user's directory, which
        # would then be given to the recorded owner.
        temporary = new_temporary_name(run)
        os.mkdir(temporary, 0o700, dir_fd=place)
        made = open_directory(place, temporary)
        try:
            # Fails if the name appeared meanwhile, instead of replacing an empty directory.
            rename_new(place, temporary, parent.fd, name)
        except BaseException:
            os.close(made)
            os.rmdir(temporary, dir_fd=place)
            raise
        return cls(made, path, source_path, parent=parent, fresh=True)

    @classmethod
    def enter(cls, parent: Folder, name: bytes, source_path: bytes) -> Folder:
        """Open an existing directory. NotADirectoryError for anything else, a symbolic link included."""
        return cls(open_directory(parent.fd, name), join(parent.path, name), source_path, parent=parent)

    def workplace(self, run: str) -> int:
        """Return a descriptor of the directory in which new files are prepared before they are renamed into this one. OSError.

        It is this directory itself, unless another user may replace names in it.
        """
        # A directory that this run has created has mode 0700 until the end: no other user can replace names in it.
        if self.fresh:
            return self.fd
        with _preparing:
            if self._append_only is None:
                self._append_only = is_append_only(self.fd)
            if self._append_only:
                # A temporary name made in it could not be renamed or removed any more.
                raise PermissionError(errno.EPERM, "its directory is append-only (chattr +a)")
            if self._private is None:
                if not is_shared(self.fd):
                    return self.fd
                self._private = _make_private_dir(self.fd, run)
                self._with_private.add(self)
            return self._private.fd

    def leave_workplace(self) -> None:
        """Remove the directory for unfinished files. None of them may be in use."""
        private, self._private = self._private, None
        if private is not None:
            self._with_private.discard(self)
            private.remove()

    def leave_all_workplaces(self) -> None:
        """Call `leave_workplace` for all directories below this one, after a run that was cut short."""
        for folder in list(self._with_private):
            folder.leave_workplace()

    def hold(self) -> None:
        """Count another user of this directory."""
        self._pending += 1

    def release(self, lock: AbstractContextManager[object], syncer: Syncer, finished: WhenDone) -> None:
        """Count a user less; after the last one, set the attributes and call ``finished`` with what went wrong.

        Takes the lock, and does not hold it while attributes are set and the directory is synced.
        """
        # A loop instead of a recursion, because directories may be thousands deep.
        folder: Folder | None = self
        while folder is not None and folder._is_last(lock):
            problems = folder._settle(syncer)
            # Its entry in the parent is held until here, so the parent gets its own times after this directory is done.
            with lock:
                finished(folder, problems)
            folder = folder.parent

    def drop(self) -> None:
        """Close the directory and leave it as it is."""
        self.leave_workplace()
        fd, self.fd = self.fd, NOT_THERE
        if fd != NOT_THERE:
            self._put_mode_back(fd)
            os.close(fd)

    def __del__(self) -> None:
        # A run that was cut short releases nothing: its descriptors are closed here.
        self.drop()

    def _is_last(self, lock: AbstractContextManager[object]) -> bool:
        with lock:
            self._pending -= 1
            return not self._pending

    def _put_mode_back(self, fd: int) -> None:
        if self._lifted is not None:
            with suppress(OSError):
                os.chmod(fd, self._lifted)
            self._lifted = None

    def _settle(self, syncer: Syncer) -> list[str]:
        """Set the attributes and queue the directory to be synced; return what went wrong."""
        problems: list[str] = []
        if self.fd == NOT_THERE:
            return problems
        try:
            # First, because removing a name changes the directory's modification time.
            self.leave_workplace()
            self._put_mode_back(self.fd)
            if self.entry is not None:
                problems += attributes.apply(self.fd, os.fstat(self.fd), self.entry, self.xattrs)
        except OSError as error:
            problems.append(error.strerror or str(error))
        fd, self.fd = self.fd, NOT_THERE
        syncer.add(fd, self.path)
        return problems


class Syncer:
    """Syncs directories, many at a time.

    The first fsync of a batch writes the file system's journal, and the others find it written: two thousand directories took
    22 seconds one by one, because each waited for a write of its own.
    """

    def __init__(self, failed: Callable[[bytes, OSError], None], *, durable: bool = True) -> None:
        """Take the callback for failures. Not ``durable``: nothing is synced, because the caller syncs all of it later."""
        self._failed = failed
        self._durable = durable
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, bytes]] = []

    def add(self, fd: int, path: bytes) -> None:
        """Queue a directory; its descriptor belongs to the syncer from now on."""
        with self._lock:
            self._waiting.append((fd, path))
            full = len(self._waiting) >= _MAX_UNSYNCED
        if full:
            self.flush()

    def flush(self) -> None:
        """Sync all queued directories; on return they are durable or were reported as failed."""
        # The lock is not held while syncing: other threads go on queueing meanwhile.
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for fd, path in waiting:
            try:
                if self._durable:
                    os.fsync(fd)
            except OSError as error:
                self._failed(path, error)
            finally:
                os.close(fd)


@contextmanager
def many_descriptors() -> Iterator[None]:
    """Raise the soft limit of open descriptors to the hard one for the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def make_targets(
    repository: Repository, snapshot: Snapshot, paths: list[bytes], dest: bytes | None
) -> tuple[RestoreTarget, ...]:
    """Return the target of each path; a path below another one is left to that one.

    Raises:
        NotFound: the snapshot does not have a path.
        UsageError: no path was given, two would get the same destination, or one lies in the repository.
        Damaged: a tree above a path cannot be read.
    """
    if not paths:
        raise UsageError("nothing to restore: no path was given")
    targets: dict[bytes, RestoreTarget] = {}
    for path in sorted({normalise(path) for path in paths}):
        source = find(repository, snapshot, path)
        name = posixpath.basename(path)
        if not name:
            raise UsageError("the root directory of the machine has no name to restore it under")
        parent = posixpath.dirname(path) if dest is None else normalise(os.path.abspath(dest))
        target = RestoreTarget(source, join(parent, name), in_place=parent == posixpath.dirname(path))
        other = targets.get(target.path)
        if other is not None:
            raise UsageError(
                f"{one_line(other.source.path)} and {one_line(path)} would both become {one_line(target.path)}",
                hint="restore them one by one, into different directories",
            )
        # Sorted, parents come first: a path below another one is restored with it.
        if not any(is_within(path, seen.source.path) for seen in targets.values() if target.in_place):
            targets[target.path] = target
    made = tuple(targets.values())
    for target in made:
        _require_outside_repository(repository, target)
    return made


def _require_outside_repository(repository: Repository, target: RestoreTarget) -> None:
    """Raise UsageError for a destination in the repository itself."""
    # Both resolved, because a symbolic link on the way may lead into the repository.
    inside = os.path.realpath(os.fsencode(repository.path))
    if is_within(os.path.realpath(target.path), inside):
        raise UsageError(
            f"{one_line(target.path)} lies in the repository itself", hint="choose another directory"
        )


def check_usable(target: RestoreTarget) -> None:
    """Check that something can be created at the destination, as far as that can be seen without trying.

    Raises:
        UsageError: the destination that the caller chose is no directory.
        NotPermitted: it is plain that nothing can be created there.
    """
    if not target.in_place:
        _require_directory(posixpath.dirname(target.path))
    place = target.path if target.source.entry.is_dir else posixpath.dirname(target.path)
    while not os.path.lexists(place):
        place = posixpath.dirname(place)
    # Anything but a directory is a conflict, which the plan finds, or an obstacle, which `open_parent` finds.
    if not os.path.isdir(place):
        return
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        raise NotPermitted(
            f"{one_line(place)} cannot be read", hint="run as a user who may write there"
        ) from None
    try:
        # With effective ids, which access(2) ignores: what counts is what this process may do.
        if os.access(b".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
            return
        if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
            raise NotPermitted(
                f"{one_line(place)} is on a read-only file system", hint="choose another destination"
            )
        if may_lift(os.fstat(fd)):
            return
    finally:
        os.close(fd)
    raise NotPermitted(f"{one_line(place)} cannot be written to", hint="run as a user who may, or use -d")


def _require_directory(dest: bytes) -> None:
    """Raise UsageError where the destination, or the nearest thing above it that exists, is no directory."""
    while not os.path.lexists(dest):
        dest = posixpath.dirname(dest)
    if os.path.exists(dest) and not os.path.isdir(dest):
        raise UsageError(
            f"the destination must be a directory, and {one_line(dest)} is a file",
            hint="name a directory with -d; it is made if it is missing",
        )


def open_parent(
    repository: Repository, snapshot: Snapshot, target: RestoreTarget, *, dry_run: bool
) -> tuple[Folder, list[Folder]]:
    """Open the directory that the target's name is in; missing directories are created, except in a dry run.

    Returns:
        The directory, and all directories opened on the way, to be released in reverse order.

    Raises:
        CiuicError: something that is no directory is in the way.
        OSError: a directory cannot be opened or created.
    """
    parent = posixpath.dirname(target.path)
    if not target.in_place:
        chain = [Folder(_open_or_none(parent, dry_run), parent, posixpath.dirname(target.source.path))]
    else:
        base, names = _way_in(target)
        chain = [Folder(_open_or_none(base, dry_run), base, base)]
        for name in names:
            chain.append(_step(repository, snapshot, chain[-1], name, dry_run))
    if not dry_run:
        chain[-1].lift()
    return chain[-1], chain


def _way_in(target: RestoreTarget) -> tuple[bytes, list[bytes]]:
    """Return a path to open as it is, and the names from there to the target's parent, which must be directories."""
    root = target.source.root.path
    top = posixpath.dirname(root)
    parent = posixpath.dirname(target.path)
    if parent == top or not is_within(parent, root):
        return parent, []
    # The root's own path may contain symbolic links: the operator chose it.
    if os.path.isdir(root):
        return root, [name for name in parent[len(root) :].split(b"/") if name]
    return top, [name for name in parent[len(top) :].split(b"/") if name]


def _step(repository: Repository, snapshot: Snapshot, above: Folder, name: bytes, dry_run: bool) -> Folder:
    path, run = join(above.path, name), new_run()
    if above.fd == NOT_THERE:
        return Folder.make(above, name, path, run=run, dry_run=dry_run)
    if above.leads_away(name):
        raise CiuicError(
            f"another file system is mounted at {one_line(path)}: nothing was restored into it",
            hint="unmount it, or restore elsewhere with -d",
        )
    try:
        return Folder.enter(above, name, path)
    except FileNotFoundError:
        if not dry_run:
            above.lift()
        made = Folder.make(above, name, path, run=run, dry_run=dry_run)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise CiuicError(
                f"{one_line(path)} was a directory at {snapshot.id} and is something else now",
                hint="move it out of the way, or restore elsewhere with -d",
            ) from None
        raise
    above.leave_workplace()
    # A directory that is missing on the way comes back with the attributes that the snapshot has for it.
    was: Located = find(repository, snapshot, path)
    made.entry, made.xattrs = was.entry, repository.trees.xattrs(was.entry)
    return made


def _open_or_none(path: bytes, dry_run: bool) -> int:
    try:
        return open_way(path, make=not dry_run)
    except FileNotFoundError:
        if not dry_run:  # mkdir(2) in /proc and its like, or a directory that was removed meanwhile
            raise CiuicError(
                f"the directory {one_line(path)} cannot be made: no directory can be made above it",
                hint="name another with -d",
            ) from None
        return NOT_THERE
