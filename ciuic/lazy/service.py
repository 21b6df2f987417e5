"""Life of a lazy restore: skeleton, mount, filling, and the plain directory in the end.

Guarantees: a placeholder has its hidden link before it has its own name, so it never looks complete; `ready` is called when the mount
answers; if the process ends before the end, the same call goes on later, from a directory as a killed process leaves it; the tree takes
the destination's place in one step for everybody who looks, after all of it is durable. The mount is served until nobody works in it,
and only then taken away, and open files are served until they are closed; it is gone however the restore ends.

In the destination, as long as it is incomplete (`LazyLayout`)::

    INCOMPLETE-RESTORE                     says in words what this is
    .ciuic-state/lazy-restore/lock         locked by the process that restores
    .ciuic-state/lazy-restore/record       which snapshot, and how far (JSON)
    .ciuic-state/lazy-restore/pending/     a hidden link of each incomplete file (incomplete_files.py)
    .ciuic-state/lazy-restore/changes/     what the job has changed of incomplete files (changes.py)
    .ciuic-state/lazy-restore/tree/NAME    the tree

The record is replaced atomically and durably; every directory belongs to root alone, and is opened without following links. The
tree appears in the destination only after `LazyPhase.MOVING` is durable, which is after everything in it is.
"""

from __future__ import annotations

import errno
import os
import posixpath
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import structlog

from ciuic import STATE_DIR_NAME
from ciuic.errors import Busy, CiuicError, DestinationExists, NotPermitted, UsageError
from ciuic.fuse_layer.driver_choice import ask_kernel
from ciuic.fuse_layer.kernel.session import negotiate
from ciuic.fuse_layer.system import mounts, syscalls
from ciuic.lazy.changes import ChangeJournals, durable_part, replay
from ciuic.lazy.filesystem import LazyCore, LazyDriver, RequestGate
from ciuic.lazy.filling import Filler, Settler
from ciuic.lazy.incomplete_files import PendingFiles, PendingName
from ciuic.lazy.progress import DEFAULT_DIRECTORY, LazyOutcome, LazyStatus, LostFile, StatusFile
from ciuic.printable import one_line
from ciuic.protocol.state_directory import own_directory, remove_state
from ciuic.repository import Repository
from ciuic.repository.lookup import find, join, normalise
from ciuic.restore import attributes, execute, plan_restore
from ciuic.restore.destination import Remover, open_way, rename_new, unlink_if_there
from ciuic.restore.destination_directories import many_descriptors
from ciuic.restore.new_files import NonDirectory
from ciuic.structs import decode_json
from ciuic.system.disk import NEW_FILE, READ_DIRECTORY, Disk, open_locked, read_regular, read_xattrs
from ciuic.system.interrupts import SIGNALS
from ciuic.system.mountinfo import LAZY_FS_TYPE, LAZY_RESTORE
from ciuic.system.open_files import describe, mount_users
from ciuic.system.processes import boot_id
from ciuic.types import Snapshot

MARKER: Final = b"INCOMPLETE-RESTORE"
_RECORD, _LOCK, _PENDING, _CHANGES, _TREE = b"record", b"lock", b"pending", b"changes", b"tree"
_DAMAGED: Final = b".ciuic-damaged"
"""Ending of the name of a file that cannot be completed, and to which a job has written."""
_MAX_NAME_BYTES: Final = 255
_MAX_RECORD_BYTES: Final = 16 << 20
_MAX_FAILURES: Final = 10_000
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WORDS: Final = """\
This directory is being restored by ciuic, and is not complete: the process that restored it has ended, or its mount was taken away.
Run the same command again (ciuic restore --lazy …): it goes on. Or remove this directory with everything in it.
"""


class LazyPhase(str, Enum):
    """Phase of a lazy restore."""

    SKELETON = "skeleton"
    """Directories and placeholders are being made."""
    FILLING = "filling"
    """All names are there; files with a hidden link are incomplete."""
    MOVING = "moving"
    """Everything is complete, and is moved to the destination."""


class LazyRecord(msgspec.Struct):
    """Record from which a later run goes on."""

    snapshot: str
    source: str
    """Path at the snapshot, in hexadecimal."""
    special: bool
    phase: LazyPhase = LazyPhase.SKELETON
    lost: list[LostFile] = []
    left_out: int = 0
    left_out_because: str = ""
    boot: str = ""
    """Start of the machine in which placeholders and links were made, until they are durable; empty afterwards."""
    used_in: str = ""
    """Start of the machine in which the journals of changes were written."""
    times: tuple[int, int] | None = None
    """Access and modification time of the restored directory in nanoseconds, once it is being moved."""
    version: int = 2
    """1: without journals of changes. A version of ciuic that knows no others refuses a record with them, which it would fetch over."""

    def encode(self) -> bytes:
        """Return the record as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> LazyRecord:
        """Decode a record. ValueError for anything else."""
        try:
            record = decode_json(data, cls)
            bytes.fromhex(record.source)
        except msgspec.DecodeError as error:
            raise ValueError(f"not the record of a lazy restore: {error}") from None
        if record.version not in (1, 2):
            raise ValueError(f"the version must be 1 or 2, got {record.version}")
        # Whoever goes on with it writes journals.
        record.version = 2
        return record


class LazyLayout:
    """The directories, open and locked. ``close`` lets them go and leaves them as they are."""

    def __init__(self, destination: int, path: bytes) -> None:
        """Open or make them in the destination, an open directory that stays the caller's.

        Raises:
            Busy: another process restores there.
            DestinationExists: the directory is not empty, and was not begun by a lazy restore.
            CiuicError: what an earlier run left cannot be read.
            OSError: they cannot be made.
        """
        self.destination: Final = destination
        self.path: Final = path
        self._opened: list[int] = []
        self.record: LazyRecord | None = None
        """Record of the run that was begun; None for a new one."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        names = set(map(os.fsencode, os.listdir(self.destination))) - {STATE_DIR_NAME, MARKER}
        begun = _has_directory(self.destination)
        if names and not begun:
            raise DestinationExists(
                f"{one_line(self.path)} is not empty, and --lazy restores into a new or empty directory",
                hint="restore without --lazy, or into another directory with -d",
            )
        state = self._own(self.destination, STATE_DIR_NAME)
        self.directory = self._own(state, LAZY_RESTORE)
        self._lock()
        self.record = self._read()
        if names and (self.record is None or self.record.phase is not LazyPhase.MOVING):
            raise DestinationExists(
                f"{one_line(self.path)} is an incomplete restore, and something else was put there since: "
                f"{', '.join(one_line(name) for name in sorted(names)[:5])}",
                hint="move it away, and run the command again",
            )
        self.pending = self._own(self.directory, _PENDING)
        self.changes = self._own(self.directory, _CHANGES)
        self.tree = self._own(self.directory, _TREE)

    def _own(self, parent: int, name: bytes) -> int:
        fd = own_directory(parent, name)
        self._opened.append(fd)
        return fd

    def _lock(self) -> None:
        try:
            self._opened.append(open_locked(_LOCK, dir_fd=self.directory))
        except BlockingIOError:
            raise Busy(
                f"another process restores {one_line(self.path)}", hint="ciuic restore --status shows it"
            ) from None

    def _read(self) -> LazyRecord | None:
        try:
            data = read_regular(_RECORD, _MAX_RECORD_BYTES, dir_fd=self.directory)
        except FileNotFoundError:
            return None
        if not data:
            # One that was not durable yet when the machine stopped.
            return None
        try:
            return LazyRecord.decode(data)
        except ValueError as error:
            raise CiuicError(
                f"{one_line(self.path)} holds an interrupted lazy restore that cannot be read: {error}",
                hint="remove the directory, and restore anew",
            ) from None

    def write(self, record: LazyRecord, *, durable: bool = True) -> None:
        """Replace the record, durably unless the caller says that a lost one does no harm."""
        record.lost = record.lost[:_MAX_FAILURES]
        # The phase must be durable before what it permits.
        Disk().replace_file(_RECORD, record.encode(), dir_fd=self.directory, durable=durable)
        self.record = record

    def needs_skeleton(self) -> bool:
        """Return whether the skeleton has to be made, or made anew."""
        record = self.record
        if record is None or record.phase is LazyPhase.SKELETON:
            return True
        # Not synced yet when the machine stopped: any of its names may be missing.
        return bool(record.boot) and record.boot != boot_id()

    def mark(self) -> None:
        """Put the file into the destination that says in words what it is."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        try:
            fd = os.open(MARKER, flags, 0o644, dir_fd=self.destination)
        except FileExistsError:
            # It is removed, not written to: it may be another name of any file, planted by the owner of the destination.
            os.unlink(MARKER, dir_fd=self.destination)
            fd = os.open(MARKER, flags, 0o644, dir_fd=self.destination)
        with os.fdopen(fd, "w") as file:
            file.write(_WORDS)
        os.fchmod(self.destination, 0o700)

    def empty(self) -> None:
        """Remove a skeleton that was cut short."""
        remover = Remover()
        for fd, name in ((self.tree, _TREE), (self.pending, _PENDING), (self.changes, _CHANGES)):
            for entry in map(os.fsencode, os.listdir(fd)):
                remover.remove(fd, entry, name + b"/" + entry, b"")
        if remover.failures:
            path, reason = remover.failures[0]
            raise CiuicError(f"{one_line(path)} of an interrupted restore is in the way: {reason}")

    def open_tree(self, name: bytes) -> int:
        """Open the restored directory in the tree; the caller closes the descriptor."""
        return os.open(name, READ_DIRECTORY, dir_fd=self.tree)

    def finish(self, record: LazyRecord, content: int) -> None:
        """Move the tree from the directory ``content`` to the destination, give that its attributes, and remove what is ours.

        Raises:
            OSError: EEXIST where something was put into the destination meanwhile.
        """
        if record.times is None:
            st = os.fstat(content)
            record.times = (st.st_atime_ns, st.st_mtime_ns)
            record.phase = LazyPhase.MOVING
            # Before the first move: a later run must not take what was moved for something that is in the way.
            self.write(record)
        # What an earlier run has moved is in the destination already.
        for name in map(os.fsencode, os.listdir(content)):
            rename_new(content, name, self.destination, name)
        # An earlier run may have been of a version whose core made a state directory; a remover of trees spares it.
        remove_state(content)
        _copy_attributes(content, self.destination)
        # Without this a power cut could leave neither the names nor the record that would move them again.
        os.fsync(self.destination)
        self._remove_own()
        os.utime(self.destination, ns=record.times)
        os.fsync(self.destination)

    def _remove_own(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(MARKER, dir_fd=self.destination)
        state = own_directory(self.destination, STATE_DIR_NAME)
        try:
            Remover().remove(state, LAZY_RESTORE, LAZY_RESTORE, b"")
        finally:
            os.close(state)
        # Another state of ciuic may be there.
        with suppress(OSError):
            os.rmdir(STATE_DIR_NAME, dir_fd=self.destination)

    def close(self) -> None:
        """Close everything; the lock is released."""
        for fd in reversed(self._opened):
            os.close(fd)
        self._opened = []


def _has_directory(destination: int) -> bool:
    """Return whether a lazy restore was begun in an open directory, whichever user owns what is there."""
    try:
        os.stat(STATE_DIR_NAME + b"/" + LAZY_RESTORE, dir_fd=destination, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise
    return True


def _copy_attributes(source: int, target: int) -> None:
    """Give a directory owner, extended attributes and mode of another one, in an order in which no user is let in too early."""
    st = os.fstat(source)
    # The target has mode 0700 and is root's until the last step.
    os.chown(target, st.st_uid, st.st_gid)
    wanted = read_xattrs(source)
    for name in read_xattrs(target).keys() - wanted.keys():
        with suppress(OSError):
            os.removexattr(target, name)
    for name, value in wanted.items():
        # What a security module decides stays as it decides; the plain restore has reported what could not be set.
        with suppress(OSError):
            os.setxattr(target, name, value)
    os.chmod(target, stat.S_IMODE(st.st_mode))


log = structlog.get_logger(__name__)

_FS_TYPE: Final = LAZY_FS_TYPE.decode()
_STATUS_SECONDS: Final = 0.5
_PROBE_SECONDS: Final = 2.0
_LEAVE_SECONDS: Final = 0.5
_SWITCH_INTERVAL_SECONDS: Final = 0.002
"""Less than the usual 5 ms, so that requests do not wait for threads that fetch. With 0.5 ms, as in an overlay's worker, a fifth of
the time of a restore went into switching."""

# Writing removes file capabilities, also when root writes (capabilities(7)).
_LOST_BY_WRITING: Final = b"security.capability"
# Errors of link(2) that say nothing about the file: no more links to it, or none at all on this file system.
_NOT_LINKABLE: Final = (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class MountedRestore:
    """One mount, from its beginning to its end."""

    def __init__(
        self,
        repository: Repository,
        layout: LazyLayout,
        record: LazyRecord,
        pending: PendingFiles,
        content: int,
        backing: int,
        status: StatusFile,
    ) -> None:
        """Take the parts.

        Args:
            repository: repository to read from.
            layout: directories below the mount.
            record: record of the restore.
            pending: incomplete files.
            content: descriptor of the tree that is served.
            backing: O_PATH descriptor of the destination.
            status: what others are told.
        """
        self._layout = layout
        self._record = record
        self._pending = pending
        self._content = content
        self._backing = backing
        self._status = status
        self._gate = RequestGate()
        self._filler = Filler(repository, pending)
        self._settler = Settler(pending)
        self._mounted = False
        self._mount: mounts.MountEntry | None = None
        self._failure: OSError | None = None

    def serve(self, outcome: LazyOutcome, ready: Callable[[LazyStatus], None]) -> None:
        """Serve until everything is there and the last file is closed.

        Args:
            outcome: gets the paths that cannot be restored.
            ready: called when the mount answers.

        Raises:
            CiuicError: the mount was taken away before the end.
        """
        offer = ask_kernel(self._content)
        self._pending.put_in_order()
        before = mounts.mounts_of(_FS_TYPE)
        fuse_fd = mounts.mount_fuse(self._backing, _FS_TYPE)
        self._mounted = True
        self._mount = mounts.new_mount(_FS_TYPE, before, self._layout.path)
        try:
            negotiated = negotiate(fuse_fd, passthrough=offer.passthrough, stack_depth=offer.stack_depth)
            core = LazyCore(
                self._content, self._pending, self._settler, kernel_keeps_times=negotiated.writeback
            )
            driver = LazyDriver(core, fuse_fd, negotiated, self._pending, self._gate)
            sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
            driver.session.begin()
            threading.Thread(target=self._make_durable, args=(core,), name="sync", daemon=True).start()
            self._settler.start()
            self._filler.start()
            self._status.status.files_total = self._pending.files_total
            self._status.status.bytes_total = self._pending.bytes_total
            self._show()
            ready(self._status.status)
            self._until_filled(core, driver)
            self._end(core, outcome)
            self._status.tell("closing", lost=outcome.lost)
            self._unmount_when_left(driver)
            # Programs that have files open go on with this session.
            driver.session.wait()
            core.close()
        finally:
            self._detach()
            self._pending.close()
            self._filler.close()
            self._settler.close()
            os.close(fuse_fd)

    def _make_durable(self, core: LazyCore) -> None:
        """Sync the skeleton, and say so in the record; an fsync in the tree waits for it."""
        try:
            if self._record.boot:
                # All at once, and behind the mount: it may take as long as others have written much to the file system.
                syscalls.syncfs(self._layout.directory)
                self._record.boot = ""
                self._layout.write(self._record)
            core.incomplete.durable.set()
        except OSError as error:
            self._failure = error
            log.exception("lazy_skeleton_not_durable")

    def _until_filled(self, core: LazyCore, driver: LazyDriver) -> None:
        while not (
            self._pending.wait_for_end(_STATUS_SECONDS) and core.incomplete.durable.wait(_STATUS_SECONDS)
        ):
            self._show()
            if self._failure is not None:
                raise self._failure
            if driver.session.is_over:
                self._mounted = False
                raise CiuicError(
                    f"the mount at {one_line(self._layout.path)} was taken away before everything was restored",
                    hint="the same command again goes on",
                )

    def _show(self) -> None:
        self._status.measure(self._pending.bytes_left)
        self._status.status.files_left = len(self._pending.by_ino)
        self._status.status.waits = self._filler.trouble
        self._status.tell("filling")

    def _end(self, core: LazyCore, outcome: LazyOutcome) -> None:
        """Put the tree in the destination's place while no request is under way; the mount shows it from then on."""
        # An interrupt in between would leave requests waiting for ever.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with self._gate.closed():
                self._remove_damaged(outcome)
                self._layout.finish(self._record, self._content)
                core.become(self._layout.destination)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._show()

    def _unmount_when_left(self, driver: LazyDriver) -> None:
        """Take the mount away as soon as no program works in a directory of it; open files outlive it by themselves.

        The working directory of such a program would have no path, and not exist for what it starts.
        """
        status = self._status.status
        while users := self._users():
            if users != status.waits:
                status.waits = users
                self._status.tell("closing")
            if driver.session.wait(_LEAVE_SECONDS):
                break
        status.waits = ""
        self._detach()

    def _users(self) -> str:
        """Return who or what a detached mount would hurt, in words."""
        entry = self._mount and mounts.mount_now(self._mount)
        if entry is None:
            return ""
        inside = [f"{one_line(one.mount_point)} (a mount)" for one in mounts.mounts_inside(entry)]
        users = describe(mount_users(entry.mount_point, files=False))
        return ", ".join([*inside, *([users] if users else [])])

    def _remove_damaged(self, outcome: LazyOutcome) -> None:
        """Remove every name of files that cannot be completed: a plain restore leaves them out as well.

        One to which a job has written is renamed instead, so that nothing of the job's is lost.
        """
        damaged = {file.ino: file for file in self._pending.damaged if not file.gone}
        if not damaged:
            return
        stack = [(os.dup(self._content), self._layout.path)]
        while stack:
            fd, path = stack.pop()
            try:
                with os.scandir(fd) as scan:
                    # All of them first: a new name would be met again.
                    entries = list(scan)
                for entry in entries:
                    name = os.fsencode(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        with suppress(OSError):
                            stack.append((os.open(name, READ_DIRECTORY, dir_fd=fd), join(path, name)))
                    elif entry.inode() in damaged:
                        file = damaged[entry.inode()]
                        reason = next(iter(file.damaged.values()))
                        if file.journaled:
                            # A run that was killed here may have done it.
                            kept = name if name.endswith(_DAMAGED) else _set_aside(fd, name)
                            reason += f"; what was written to it meanwhile is in {one_line(kept)}, with zeros for what is damaged"
                        else:
                            os.unlink(name, dir_fd=fd)
                        outcome.lost.append(LostFile(one_line(join(path, name)), reason, damaged=True))
            finally:
                os.close(fd)
        self._record.lost = outcome.lost

    def _detach(self) -> None:
        if not self._mounted:
            return
        self._mounted = False
        try:
            if self._mount is not None:
                mounts.detach_mount(self._mount)
        except OSError as error:
            log.warning("lazy_mount_not_detached", reason=str(error))


def _set_aside(fd: int, name: bytes) -> bytes:
    """Give a file of a directory another name that is free, and return it."""
    for number in count():
        ending = _DAMAGED + (b".%d" % number if number else b"")
        kept = name[: _MAX_NAME_BYTES - len(ending)] + ending
        try:
            os.link(name, kept, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
        except FileExistsError:
            continue
        os.unlink(name, dir_fd=fd)
        return kept
    raise AssertionError("count() does not end")


def detach_dead(destination: bytes) -> None:
    """Detach a mount that a killed process has left.

    Raises:
        Busy: its process is alive.
    """
    while (entry := mounts.mount_at(destination)) is not None and entry.fs_type == _FS_TYPE:
        if mounts.probe(destination, _PROBE_SECONDS) == "alive":
            raise Busy(
                f"{one_line(destination)} is being restored by another process",
                hint="ciuic restore --status shows it",
            )
        mounts.detach(destination, _FS_TYPE)


class SkeletonFiles:
    """`Placeholders` of a restore, for the thread of its walk."""

    def __init__(self, pending: PendingFiles) -> None:
        self._pending = pending
        self._number = 0

    def take(self, file: NonDirectory) -> bool:
        """Make the file without its content; False for a file that has none, or must be restored whole."""
        entry = file.entry
        # A file without blocks is all hole: it is complete with its size.
        if not entry.is_file or not entry.content or file.existing is not None:
            return False
        if any(name == _LOST_BY_WRITING for name, _ in file.xattrs):
            return False
        self._number += 1
        shape = PendingName(self._number, entry.content, entry.map_height, entry.size_bytes, entry.mtime_ns)
        link, pending = shape.encode(), self._pending.directory
        try:
            # Only root may enter either directory, so no temporary name is needed.
            fd = os.open(link, NEW_FILE, 0o600, dir_fd=pending)
            try:
                os.ftruncate(fd, entry.size_bytes)
                st = os.fstat(fd)
                problems = attributes.apply(fd, st, entry, file.xattrs)
            finally:
                os.close(fd)
            os.link(link, entry.name, src_dir_fd=pending, dst_dir_fd=file.folder.fd, follow_symlinks=False)
        except OSError as error:
            unlink_if_there(pending, link)
            if error.errno in _NOT_LINKABLE:
                return False
            file.fail(error)
            return True
        self._pending.add(shape, st.st_ino, is_new=True)
        file.inode = (st.st_dev, st.st_ino)
        file.done("restored", problems)
        return True


class LazyRestore:
    """One lazy restore.

    Args:
        repository: repository of the snapshot, open until the end.
        snapshot: snapshot to restore.
        path: absolute path of a directory, as it was at the snapshot.
        dest: directory in which it gets its base name; None: the original path.
        special: as of `plan_restore`.
        status_directory: where the status is written.
    """

    def __init__(
        self,
        repository: Repository,
        snapshot: Snapshot,
        path: bytes,
        dest: bytes | None = None,
        *,
        special: bool | None = None,
        status_directory: Path = DEFAULT_DIRECTORY,
    ) -> None:
        self._repository = repository
        self._snapshot = snapshot
        self._source = normalise(path)
        self._special = special
        self._name = posixpath.basename(self._source)
        parent = posixpath.dirname(self._source) if dest is None else os.path.abspath(dest)
        self._asked: Final = join(parent, self._name)
        # Without links: what is mounted is looked for by its path in mountinfo.
        self.destination: Final = join(os.path.realpath(parent), self._name)
        self.status: Final = StatusFile(
            status_directory,
            LazyStatus(
                one_line(self.destination),
                str(snapshot.id),
                one_line(self._source),
                os.getpid(),
                began=time.time(),
            ),
        )

    def run(self, ready: Callable[[LazyStatus], None] = lambda status: None) -> LazyOutcome:
        """Restore; return when the destination is a plain directory and the mount is not in use any more.

        Args:
            ready: called when the tree stands and is mounted.

        Raises:
            NotPermitted: not root, or no /dev/fuse.
            DestinationExists: the destination is not empty, or of another restore.
            Busy: another process restores there.
            UsageError: it is no directory, or the destination cannot be mounted over.
            CiuicError: the mount was taken away before the end, or the skeleton could not be made.
        """
        self._check()
        detach_dead(self.destination)
        # Step by step, as every restore goes: no link of another user chooses the place.
        way = open_way(self._asked, make=True)
        try:
            is_same = os.path.samestat(os.fstat(way), os.stat(self.destination, follow_symlinks=False))
        except FileNotFoundError:
            is_same = False
        finally:
            os.close(way)
        if not is_same:
            raise CiuicError(f"{one_line(self._asked)} was exchanged meanwhile", hint="try again")
        os.chdir("/")
        # The core applies each caller's umask.
        before = os.umask(0)
        try:
            with ExitStack() as closing, many_descriptors():
                return self._run(closing, ready)
        finally:
            os.umask(before)

    def _check(self) -> None:
        if os.geteuid() != 0:
            raise NotPermitted("--lazy mounts, which only root may", hint="sudo, or restore without --lazy")
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            raise NotPermitted(
                "--lazy needs /dev/fuse, which this machine or container does not have",
                hint="restore without --lazy, or give the container --device /dev/fuse --cap-add SYS_ADMIN",
            )
        if not self._name:
            raise UsageError("the root directory of the machine has no name to restore it under")
        if not find(self._repository, self._snapshot, self._source).entry.is_dir:
            raise UsageError(
                f"{one_line(self._source)} is no directory, and --lazy restores directories",
                hint="restore it without --lazy",
            )

    # -- the way to the mount

    def _run(self, closing: ExitStack, ready: Callable[[LazyStatus], None]) -> LazyOutcome:
        backing = self._kept(closing, mounts.open_backing(self.destination))
        entry = mounts.mount_of(backing)
        if entry is not None and entry.fs_type == mounts.FS_TYPE:
            raise UsageError(
                f"{one_line(self.destination)} lies in a protected root, over which --lazy does not mount",
                hint="restore without --lazy, or into another directory with -d",
            )
        below = self._kept(closing, os.open(b"/proc/self/fd/%d" % backing, os.O_RDONLY | os.O_DIRECTORY))
        layout = LazyLayout(below, self.destination)
        closing.callback(layout.close)
        try:
            return self._begun(closing, layout, backing, ready)
        except BaseException as error:
            code = error.exit_code if isinstance(error, CiuicError) else 1
            self.status.tell("interrupted", code=code)
            raise

    def _begun(
        self, closing: ExitStack, layout: LazyLayout, backing: int, ready: Callable[[LazyStatus], None]
    ) -> LazyOutcome:
        record = layout.record
        journals = ChangeJournals(layout.changes)
        pending = PendingFiles(layout.pending, self._repository.block_size, journals)
        if record is None or layout.needs_skeleton():
            if record is not None:
                self._require_same(record)
            record = self._new_record()
            self._make_skeleton(layout, record, pending)
        else:
            self._require_same(record)
            self._take_up(layout, pending, journals, record)
        outcome = LazyOutcome(
            self.destination,
            files=pending.files_total,
            bytes=pending.bytes_total,
            lost=list(record.lost),
            left_out=record.left_out,
            left_out_because=record.left_out_because,
        )
        content = self._kept(closing, layout.open_tree(self._name))
        if record.phase is LazyPhase.MOVING:
            layout.finish(record, content)
            ready(self.status.status)
        else:
            MountedRestore(self._repository, layout, record, pending, content, backing, self.status).serve(
                outcome, ready
            )
        outcome.complete = True
        self.status.tell("complete", code=outcome.exit_code, lost=outcome.lost)
        return outcome

    def _kept(self, closing: ExitStack, fd: int) -> int:
        closing.callback(os.close, fd)
        return fd

    def _new_record(self) -> LazyRecord:
        foreign = self._repository.foreign_reason() if self._special is None else ""
        special = not foreign if self._special is None else self._special
        return LazyRecord(str(self._snapshot.id), self._source.hex(), special)

    def _require_same(self, record: LazyRecord) -> None:
        if (record.snapshot, record.source) != (str(self._snapshot.id), self._source.hex()):
            raise DestinationExists(
                f"{one_line(self.destination)} is an incomplete restore of "
                f"{one_line(bytes.fromhex(record.source))} from {one_line(os.fsencode(record.snapshot))}",
                hint="finish that one, or remove the directory",
            )

    def _make_skeleton(self, layout: LazyLayout, record: LazyRecord, pending: PendingFiles) -> None:
        layout.empty()
        # Not durable, nor is the next one: after a power cut the skeleton is made anew in any case.
        layout.write(record, durable=False)
        layout.mark()
        self.status.tell("preparing")
        tree = join(self.destination, STATE_DIR_NAME + b"/" + LAZY_RESTORE + b"/tree")
        plan = plan_restore(self._repository, self._snapshot, [self._source], tree, special=self._special)
        result = execute(plan, placeholders=SkeletonFiles(pending))
        if result.stopped:
            raise CiuicError(
                f"the tree could not be made: {result.stopped}", hint="run it again when there is room"
            )
        shift = len(join(tree, self._name))
        for failure in result.failed:
            path = one_line(self.destination + failure.path[shift:])
            record.lost.append(LostFile(path, failure.reason, failure.damaged, failure.attribute))
        record.left_out, record.left_out_because = len(result.left_out), result.left_out_because
        record.phase = LazyPhase.FILLING
        # Placeholders and their hidden links become durable behind the mount (`MountedRestore`).
        record.boot = record.used_in = boot_id()
        layout.write(record, durable=False)

    def _take_up(
        self, layout: LazyLayout, pending: PendingFiles, journals: ChangeJournals, record: LazyRecord
    ) -> None:
        """Read from the hidden links, and the journals, what an interrupted run has left to do."""
        same_boot = record.used_in == boot_id()
        kept: set[bytes] = set()
        for name in map(os.fsencode, os.listdir(pending.directory)):
            shape = PendingName.decode(name)
            st = os.stat(name, dir_fd=pending.directory, follow_symlinks=False)
            journal = None if shape is None else journals.read(name)
            changes = None
            if shape is not None and journal is not None:
                if not same_boot:
                    journal = durable_part(journal)
                    journals.replace(name, journal)
                changes = replay(journal, shape.size_bytes, shape.mtime_ns)
            size = changes.size_bytes if changes is not None else st.st_size
            # Cut to nothing, or without another name: killed before the link was removed.
            is_cut = shape is not None and (not size if changes is not None else size != shape.size_bytes)
            if shape is None or is_cut or st.st_nlink < 2:
                os.unlink(name, dir_fd=pending.directory)
                continue
            if st.st_size != size:
                # A change of size that was recorded and not carried out, or a write that was not acknowledged.
                os.truncate(b"/proc/self/fd/%d/%b" % (pending.directory, name), size)
            pending.add(shape, st.st_ino, is_new=False, changes=changes)
            kept.add(name)
        journals.keep_only(kept)
        if not same_boot:
            # After every journal has lost what does not count any more: a later run in this boot believes all of it.
            record.used_in = boot_id()
            layout.write(record)
