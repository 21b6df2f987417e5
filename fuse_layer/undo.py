"""The undo log, writing side: what sealed, uncaptured epochs still need is saved before the job changes it.

Invariants (docs/architecture.md §5, undo_format.py):

* A record is in the log before the change that it protects against happens.
* A record's epoch is the newest in which its content was true: the last sealed one. A thing is saved once an epoch.
* No failure in here reaches the job. A failure to save (no space, no more links, an I/O error) *abandons* the sealed epochs:
  the log says that they are given up, their changes fold into the current epoch, and the job goes on.

All methods named ``keep_…`` are called inside the gate, for inodes of the root's own file system that the current epoch did
not create. When nothing is sealed (``active`` is false) they cost one attribute look-up at the caller.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from ciuic.fuse_layer import syscalls, undo_format
from ciuic.fuse_layer.blockset import MOST_BLOCKS, BlockSet, blocks_of
from ciuic.fuse_layer.file_content import data_ranges, write_all, write_pieces
from ciuic.fuse_layer.hidden_links import HiddenLinks, fresh_directory
from ciuic.fuse_layer.inherited_undo import InheritedUndo, read_undo
from ciuic.fuse_layer.undo_format import AbandonedRecord, BlocksRecord, InodeRecord, NameRecord, OldStat
from ciuic.fuse_layer.ways import Descriptor
from ciuic.state_directory import own_directory
from ciuic.xattrs import read_xattrs

UNDO_DIR: Final = b"undo"
_LOCK_STRIPES: Final = 64
_COPY_BYTES: Final = 1 << 20
_ROOM_CHECK_BYTES: Final = 16 << 20
"""Copied bytes between two looks at the free space: 2 µs of statvfs for 10 ms of copying."""
_CANNOT_CLONE: Final = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL)


class Abandoned(NamedTuple):
    """A sealed epoch that was given up."""

    epoch: int
    reason: str
    time_ns: int


MAX_DIRECTORIES: Final = 4096
"""Limit of directories that were moved since the cut and are kept open: each is a descriptor, and a user can move any number."""


class UndoLog:
    """The undo directory of one root, and the tables of what is saved in it. Thread-safe."""

    def __init__(
        self,
        state_fd: int,
        *,
        block_size: int,
        limit_bytes: int,
        on_abandon: Callable[[list[int], str], None],
        inherit: bool = False,
    ) -> None:
        """``inherit``: go on with what a killed predecessor saved, where that is possible (``inherited``)."""
        self.block_size = block_size
        self.limit_bytes = limit_bytes
        self.bytes_kept = 0
        """Space that undo takes on the backing file system, removed files that are kept alive included."""
        self._copied_bytes = 0
        """Part of ``bytes_kept`` that is new on the disk: written by root, and so charged to no user's quota."""
        self._room_checked_at = 0
        self.clones = True
        """Whether the backing file system shares extents, as far as is known."""
        self._on_abandon = on_abandon
        self._pending: list[int] = []
        self.true_epoch = 0
        """The last sealed epoch, for which everything that is saved now is true."""
        self._io = threading.Lock()
        self._locks = tuple(threading.RLock() for _ in range(_LOCK_STRIPES))
        self._log: Descriptor | None = None
        self._changing_log = threading.Lock()
        """Held where ``_log`` and the name of the log change: ``_log`` is None or has that name."""
        self._kept_directories: dict[int, Descriptor] = {}
        self.most_directories = MAX_DIRECTORIES
        self._clearing = threading.Lock()
        self._unclean = False
        """True while files of ended epochs are not removed."""
        self._forget_saved()
        self.inherited = self._inherit(state_fd) if inherit else None
        """State that was taken over from a predecessor; None where there was none."""
        if self.inherited is None:
            self._directory = fresh_directory(state_fd, UNDO_DIR)
            hold = fresh_directory(self._directory.fd, undo_format.HOLD_DIR.encode())
        else:
            hold = Descriptor(own_directory(self._directory.fd, undo_format.HOLD_DIR.encode()))
        self.hidden = HiddenLinks(hold)
        if self.inherited is not None:
            self.hidden.held |= self.inherited.held
        self.links = self.hidden.links
        """Shortcut to the table of hidden links, which every answer with attributes reads: one call less."""

    def _inherit(self, state_fd: int) -> InheritedUndo | None:
        """Read what a predecessor saved, and go on where its log ends."""
        directory = Descriptor(own_directory(state_fd, UNDO_DIR))
        found = read_undo(directory.fd, self.block_size)
        if found is None:
            return None
        if found.has_log:
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                log = Descriptor(os.open(undo_format.LOG_NAME, flags, dir_fd=directory.fd))
                os.ftruncate(
                    log.fd, found.log_bytes
                )  # a record that was cut short protects no change: it came first
            except OSError:
                return None
            self._log = log
        self._directory = directory
        self._pending = [head.epoch for head in found.heads]
        self.true_epoch = found.true_epoch
        self._inodes.update(found.inodes)
        self._names.update(found.names)
        self._blocks.update(found.blocks)
        self.bytes_kept = found.bytes_kept
        return found

    @property
    def directory_fd(self) -> int:
        return self._directory.fd

    @property
    def pending(self) -> list[int]:
        return list(self._pending)

    @property
    def active(self) -> bool:
        """True while a sealed epoch needs the old state of what is changed now."""
        return bool(self._pending)

    @property
    def takes_space(self) -> bool:
        """Whether ``abandon`` and ``tidy`` may free space on the backing file system."""
        return bool(self._pending) or self._unclean

    def lock(self, ino: int) -> threading.RLock:
        """Return the lock under which the content of one inode is saved and changed."""
        return self._locks[ino % _LOCK_STRIPES]

    # -- epochs -------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Begin to save for ``epoch``, which was just sealed. Called while the gate is held; takes constant time."""
        self._pending.append(epoch)
        self.true_epoch = epoch
        self._forget_saved()

    def end(self, epoch: int) -> None:
        """Drop what only ``epoch`` needed, which is captured or was folded into another."""
        with self._io:
            if epoch in self._pending:
                self._pending.remove(epoch)
            self._unclean = True
            self._unlink_quietly(undo_format.sealed_name(epoch).encode())
            if self._pending:
                return
        self._clear()

    def abandon(self, reason: str) -> None:
        """Give up every sealed epoch, free its space, let the job go on. Never raises."""
        with self._io:
            if not self._pending:
                return
            epochs = self.pending
            try:  # before anybody stops saving: a reader must not see an unsaved change and no note
                self._append(AbandonedRecord(epoch=epochs[-1], reason=reason))
            except OSError:
                reason = f"{reason} (and the log could not take a note of it)"  # its removal below tells the reader
                # Before saving stops, too: a successor of ours, killed now, must not take these epochs for whole.
                for epoch in epochs:
                    self._unlink_quietly(undo_format.sealed_name(epoch).encode())
            self._unclean = True
            self._pending = []
        self._on_abandon(epochs, reason)
        for epoch in epochs:
            self._unlink_quietly(undo_format.sealed_name(epoch).encode())
        self._clear()

    def _forget_saved(self) -> None:
        self._inodes: dict[int, int] = {}
        """Saved inode → its size at the end of the last sealed epoch."""
        self._names: set[tuple[int, bytes]] = set()
        self._blocks: dict[int, BlockSet] = {}

    def _clear(self) -> None:
        """Free all space. Never raises: what cannot be removed now is left for the next time (``_unclean``)."""
        try:
            with self._clearing:
                self._clear_all()
        except OSError:
            return  # out of descriptors, or the file system has failed or turned read-only: no matter of the job's

    def _clear_all(self) -> None:
        with self._io:
            if self._pending:
                return
            # Not with the others below: a save that is on its way may make a new log meanwhile, and that one stays.
            gone = [self._remove_log()]
            self._kept_directories = {}
            self._forget_saved()
            self.bytes_kept = self._copied_bytes = self._room_checked_at = 0
            names = os.listdir(self._directory.fd)
            ours = ("blocks-", "new-", "sealed-")
            gone += [self._unlink_quietly(os.fsencode(name)) for name in names if name.startswith(ours)]
        self.hidden.let_all_go(lambda: bool(self._pending))
        self._unclean = not all(gone)

    def _remove_log(self) -> bool:
        """Remove the log, and return whether its name is free."""
        with self._changing_log:
            self._log = None
            return self._unlink_quietly(undo_format.LOG_NAME.encode())

    def tidy(self) -> None:
        """Remove what could not be removed when nothing needed it any more. Never raises. No cut may be made meanwhile."""
        if self._unclean:
            self._clear()

    def _unlink_quietly(self, name: bytes) -> bool:
        """Remove a file, and return whether its name is free. One that stays is garbage, removed by ``tidy`` or at the next start."""
        try:
            os.unlink(name, dir_fd=self._directory.fd)
        except OSError as error:
            return error.errno == errno.ENOENT
        return True

    # -- saving -------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Turn a failure inside into the end of the sealed epochs: it is no error of the job's."""
        try:
            yield
        except OSError as error:
            self.abandon(f"undo log: {error.strerror or error}")
        else:
            if len(self._kept_directories) > self.most_directories:
                self.abandon(f"undo log: more than {self.most_directories} directories were moved")
            if self.bytes_kept > self.limit_bytes:
                self.abandon(f"undo log: over its limit of {self.limit_bytes} bytes")
            elif self._copied_bytes - self._room_checked_at >= _ROOM_CHECK_BYTES:
                self._check_room()

    def _check_room(self) -> None:
        """Give the sealed epochs up when copies take more space than is left.

        Other users of the file system need it too, and the owner of a root could fill it past any quota. Files that are kept alive
        do not count: they were there before.
        """
        self._room_checked_at = self._copied_bytes
        room = os.statvfs(self._directory.fd)
        if self._copied_bytes > room.f_bavail * room.f_frsize:
            self.abandon(f"undo log: its {self._copied_bytes} bytes are more than the file system has left")

    def keep_inode(self, st: os.stat_result, target: int | bytes, *, follow: bool = True) -> None:
        """Save attributes and extended attributes, read from ``target`` (a descriptor or path), before they change."""
        if st.st_ino in self._inodes:
            return
        with self.lock(st.st_ino):
            if st.st_ino in self._inodes or not self._pending:
                return
            with self.saving():
                old = OldStat.of(st, hold_links=self.hidden.of(st.st_ino))
                xattrs = read_xattrs(target, follow=follow, skip_unreadable=False)
                self._append(InodeRecord(st.st_ino, self.true_epoch, old, xattrs))
                self._inodes[st.st_ino] = st.st_size

    def keep_absent(self, dir_ino: int, name: bytes) -> None:
        """Save that the name is not there, before something takes it."""
        self._keep_name(NameRecord(dir_ino, self.true_epoch, name, 0))

    def keep_file_name(self, dir_ino: int, dir_fd: int, name: bytes, st: os.stat_result) -> None:
        """Save the binding of a name to something other than a directory, and keep the inode alive by a hard link."""
        if (dir_ino, name) in self._names or not self._pending:
            return
        with self.saving():
            self.bytes_kept += self.hidden.hold(dir_fd, name, st)
            self._keep_name(NameRecord(dir_ino, self.true_epoch, name, st.st_ino, st.st_mode >> 12))

    def keep_directory_name(
        self, dir_ino: int, name: bytes, st: os.stat_result, moved: Descriptor | None
    ) -> None:
        """Save the binding of a name to a directory. ``moved`` leads to a directory that goes on to exist elsewhere; a removed one
        needs none, because every name that was in it at the cut has a record by then."""
        fd = -1
        if moved is not None:
            fd = self._kept_directories.setdefault(st.st_ino, moved).fd
        self._keep_name(NameRecord(dir_ino, self.true_epoch, name, st.st_ino, st.st_mode >> 12, fd))

    def _keep_name(self, record: NameRecord) -> None:
        key = (record.dir_ino, record.name)
        if key in self._names:
            return
        with self.lock(record.dir_ino):
            if key in self._names or not self._pending:
                return
            with self.saving():
                self._append(record)
                self._names.add(key)

    def size_at_cut(self, ino: int) -> int | None:
        """Return the file's size at the end of the last sealed epoch; None where its inode was not saved."""
        return self._inodes.get(ino)

    def unsaved_blocks(self, ino: int, offset: int, length: int) -> list[tuple[int, int]]:
        """Return the runs of blocks in the byte range that existed at the cut and are not saved yet. The inode is saved already."""
        size = self._inodes.get(ino, 0)
        first, count = blocks_of(offset, min(length, max(0, size - offset)), self.block_size)
        saved = self._blocks.get(ino)
        if saved is None:
            return [(first, count)] if count else []
        return saved.missing_runs(first, count)

    def keep_blocks(self, fd: int, ino: int, offset: int, length: int) -> None:
        """Save the old content of every block that the byte range touches. The caller holds ``lock(ino)``."""
        if not self._pending:
            return
        runs = self.unsaved_blocks(ino, offset, length)
        if not runs:
            return
        with self.saving():
            for first, count in runs:
                if first + count > MOST_BLOCKS:
                    raise OSError(errno.EFBIG, "a file is too large")
                self._copy_blocks(fd, ino, first, count)
                self._append(BlocksRecord(ino, self.true_epoch, first, count))
                self._blocks.setdefault(ino, BlockSet()).add_range(first, count)

    def _copy_blocks(self, fd: int, ino: int, first: int, count: int) -> None:
        """Copy old bytes to their own offsets in a sparse file; holes stay holes."""
        start, end = first * self.block_size, (first + count) * self.block_size
        name = undo_format.blocks_name(ino, self.true_epoch).encode()
        # The first copy in an epoch makes the file, so that nothing that lies there is ever written to.
        made = 0 if ino in self._blocks else os.O_CREAT | os.O_EXCL
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | made
        out = os.open(name, flags, 0o600, dir_fd=self._directory.fd)
        try:
            for data_start, data_end in data_ranges(fd, start, end):
                at = data_start
                while at < data_end:
                    piece = os.pread(fd, min(_COPY_BYTES, data_end - at), at)
                    if not piece:
                        break
                    write_all(out, piece, at)
                    at += len(piece)
                    self.bytes_kept += len(piece)
                    self._copied_bytes += len(piece)
            if os.fstat(out).st_size < end:
                os.ftruncate(
                    out, end
                )  # so that a reader finds zeros, not an end, where the old file had a hole
        finally:
            os.close(out)

    def clone_blocks(self, fd: int, ino: int) -> bool:
        """Save every block of the file in constant time, by sharing its extents. Return whether that was possible; otherwise nothing
        is saved. The inode is saved already; the caller holds ``lock(ino)``."""
        if not self._pending:
            return True
        size = self._inodes.get(ino, 0)
        if not self.clones or self._blocks.get(ino) is not None or not size:
            return False  # of some saved blocks may have changed since
        name = undo_format.blocks_name(ino, self.true_epoch).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            out = os.open(name, flags, 0o600, dir_fd=self._directory.fd)
        except OSError:
            return False
        try:
            syscalls.clone_file(out, fd)
        except OSError as error:
            self._unlink_quietly(name)
            self.clones = error.errno not in _CANNOT_CLONE
            return False
        finally:
            os.close(out)
        first, count = blocks_of(0, size, self.block_size)
        with self.saving():
            self._append(BlocksRecord(ino, self.true_epoch, first, count))
            self._blocks.setdefault(ino, BlockSet()).add_range(first, count)
        return True

    def has_room_for(self, size_bytes: int) -> bool:
        """Return whether so much more can be saved within the limit and a quarter of the free space."""
        room = os.statvfs(self._directory.fd)
        fits = self._copied_bytes + size_bytes <= room.f_bavail * room.f_frsize // 4
        return fits and self.bytes_kept + size_bytes <= self.limit_bytes

    def keep_copy(self, ino: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Save the content that a file had at the cut, which the caller copied to memory under the hold.

        The inode is saved already, the caller holds ``lock(ino)``. Blocks that were saved since the hold are overwritten: they
        are later than the cut. OSError, and nothing of it counts, where there is no room.
        """
        size = self._inodes.get(ino, 0)
        if not self._pending or not size:
            return
        name = undo_format.blocks_name(ino, self.true_epoch).encode()
        written = write_pieces(self._directory.fd, name, pieces, size, new=ino not in self._blocks)
        first, count = blocks_of(0, size, self.block_size)
        with self.saving():
            self.bytes_kept += written
            self._copied_bytes += written
            self._append(BlocksRecord(ino, self.true_epoch, first, count))
            self._blocks.setdefault(ino, BlockSet()).add_range(first, count)

    def create_replacement(self, ino: int) -> tuple[int, bytes]:
        """Make an empty file in the undo directory, to take the name of inode ``ino``; return its descriptor and name there."""
        name = b"new-%d" % ino
        self._unlink_quietly(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._directory.fd), name

    def _append(self, record: undo_format.Record) -> None:
        """Write a whole record in one call; it is visible to readers on return."""
        log = self._log or self._new_log()
        data = undo_format.encode(record)
        written = os.write(log.fd, data)
        if written != len(data):
            raise OSError(errno.ENOSPC, "a record of the undo log was cut short")
        self.bytes_kept += written

    def _new_log(self) -> Descriptor:
        # Two operations may save the first thing of an epoch at one instant. Without the lock the second removed the log of the
        # first, with its record, and a capture that had opened it saw no record at all.
        with self._changing_log:
            if self._log is None:
                # A log that could not be removed when its epochs ended may end in an incomplete record: it goes first.
                self._unlink_quietly(undo_format.LOG_NAME.encode())
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                fd = os.open(undo_format.LOG_NAME, flags, 0o600, dir_fd=self._directory.fd)
                self._log = Descriptor(fd)
            return self._log
