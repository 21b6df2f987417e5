"""The undo log as its worker has it: old state that sealed, uncaptured epochs still need, saved before the job changes it.

Invariants (docs/architecture.md §5, undo_format.py):

* A record is in the log, whole, before the change that it protects against happens; otherwise that change must
  not be relied upon. Nothing is synced: capture reads the same page cache, and a power cut ends the session.
* A record's epoch is the newest in which its content was true: the last sealed one. A thing is saved once an
  epoch.
* No failure in here reaches the job. A failure to save (no space, no more links, an I/O error) *abandons* the
  sealed epochs: the log says that they are given up, their changes fold into the current epoch, and the job
  goes on.

All methods named ``keep_…`` are called inside the gate, for inodes of the root's own file system that the
current epoch did not create. When nothing is sealed (``active`` is false) they cost one attribute look-up at
the caller.

A successor takes over the log of a worker that was killed (`read_undo`), so that the epochs that it had sealed are
captured as they were. Everything that a sealed epoch needs is on disk: its sealed file, the log, the old blocks
and the hold links. Nothing changes through the mount between the death and the successor's first request, because
the kernel keeps the requests. Only memory had the changes of the current epoch; its tracking has a gap then, and
the next capture compares everything.

Guarantees: either the successor knows all that the log says about saved state as its predecessor knew it, or
nothing is taken over and the epochs are lost. The latter is the case of a log that is damaged before its last
record, that gave an epoch up, that is too long to be read while the job waits, or that needs a descriptor of
the dead worker (a directory that was moved since the cut).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.sealed_format import SealedHead, read_head
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.path_handles import Descriptor
from ciuic.fuse_layer.tracking.changes import MAX_BLOCKS, BlockSet, blocks_of
from ciuic.fuse_layer.tracking.hidden_links import HeldLinks, fresh_directory, put_in_place
from ciuic.fuse_layer.undo_format import (
    AbandonedRecord,
    BlocksRecord,
    InodeRecord,
    NameRecord,
    OldStat,
    SwappedRecord,
    UndoDamaged,
)
from ciuic.protocol.state_directory import own_directory
from ciuic.system.disk import READ_DIRECTORY, read_xattrs, write_all

MAX_LOG_BYTES: Final = 4 << 20
"""Limit of a log that is read, in some 50 ms in which every request of the job waits. A longer one costs the
epochs, not the job."""
_MAX_HELD: Final = 20_000
"""Limit of hold links, for the same reason: each is a name to be listed. Their space is not counted again: it
was the job's."""


@dataclass
class InheritedUndo:
    """Undo state of a predecessor, with which a successor goes on."""

    heads: list[SealedHead]
    """Heads of the sealed epochs, oldest first; at least one."""
    true_epoch: int
    """Epoch of new records: the newest that any record or sealed file has."""
    inodes: dict[int, int] = field(default_factory=dict)
    """Sizes at the cut of inodes that are saved for that epoch."""
    names: set[tuple[int, bytes]] = field(default_factory=set)
    blocks: dict[int, BlockSet] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    reborn: set[int] = field(default_factory=set)
    """Numbers of directories that were removed since the last cut: an inode with one was created since, and
    no epoch needs it."""
    log_bytes: int = 0
    """Length of the whole records of the log; a record behind them was cut short."""
    has_log: bool = False
    bytes_kept: int = 0


def read_undo(directory_fd: int, block_size: int) -> InheritedUndo | None:
    """Read the undo directory of a killed worker, and remove files without a record; return None where it cannot be taken over."""
    try:
        return _read(directory_fd, block_size)
    except (OSError, UndoDamaged, ValueError):
        return None


def _read(directory_fd: int, block_size: int) -> InheritedUndo | None:
    names = os.listdir(directory_fd)
    sealed = sorted(int(name[len("sealed-") :]) for name in names if _is_sealed(name))
    heads = [read_head(_path(directory_fd, undo_format.sealed_name(epoch))) for epoch in sealed]
    if not heads or len({head.session for head in heads}) > 1:
        return None
    if any(
        head.block_size != block_size or head.epoch != epoch
        for head, epoch in zip(heads, sealed, strict=True)
    ):
        return None
    records, log_bytes, has_log = _read_log(directory_fd)
    if not _can_be_inherited(records, sealed[0]):
        return None
    found = InheritedUndo(
        heads,
        true_epoch=max([sealed[-1], *(record.epoch for record in records)]),
        log_bytes=log_bytes,
        has_log=has_log,
    )
    for record in records:
        _take(found, record)
    found.held = {int(name) for name in _list_held(directory_fd)}
    if len(found.held) > _MAX_HELD:
        return None
    found.bytes_kept = log_bytes + _tidy(directory_fd, names, records)
    return found


def _is_sealed(name: str) -> bool:
    return name.startswith("sealed-") and name[len("sealed-") :].isdigit()


def _path(directory_fd: int, name: str) -> str:
    return f"/proc/self/fd/{directory_fd}/{name}"


def _read_log(directory_fd: int) -> tuple[list[undo_format.Record], int, bool]:
    """Return the records, their length in bytes, and whether there is a log: without a change since the cut there is none."""
    try:
        fd = os.open(undo_format.LOG_NAME, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory_fd)
    except FileNotFoundError:
        return [], 0, False
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > MAX_LOG_BYTES:
            raise UndoDamaged("the log is too long to be read while the job waits")
        records, size = undo_format.decode_log(file.read())
    return records, size, True


def _can_be_inherited(records: Iterable[undo_format.Record], oldest: int) -> bool:
    for record in records:
        # The epochs were given up before the worker died. No worker of this version writes swapped records.
        if isinstance(record, AbandonedRecord | SwappedRecord):
            return False
        # A directory that was moved is reached by a descriptor of the worker that is gone.
        if isinstance(record, NameRecord) and record.fd >= 0 and record.epoch >= oldest:
            return False
    return True


def _take(found: InheritedUndo, record: undo_format.Record) -> None:
    """Note what a record has saved. A thing that is saved for an older epoch alone has to be saved again."""
    if record.epoch != found.true_epoch:
        return
    if isinstance(record, InodeRecord):
        found.inodes[record.ino] = record.stat.size
    elif isinstance(record, NameRecord):
        found.names.add((record.dir_ino, record.name))
        if record.fd < 0 and record.ino and record.file_type << 12 == stat.S_IFDIR:
            found.reborn.add(record.ino)
    elif isinstance(record, BlocksRecord):
        found.blocks.setdefault(record.ino, BlockSet()).add_range(record.first_block, record.count)


def _list_held(directory_fd: int) -> list[str]:
    fd = os.open(undo_format.HOLD_DIR, READ_DIRECTORY, dir_fd=directory_fd)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _tidy(directory_fd: int, names: Iterable[str], records: Iterable[undo_format.Record]) -> int:
    """Remove files of unfinished saves; return the bytes that the others take."""
    known = {undo_format.blocks_name(one.ino, one.epoch) for one in records if isinstance(one, BlocksRecord)}
    kept_bytes = 0
    for name in names:
        if name.startswith("blocks-") and name in known:
            kept_bytes += os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_blocks * 512
        elif name.startswith(("blocks-", "new-")) or name.endswith(".tmp"):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory_fd)
    return kept_bytes


_ROOM_CHECK_BYTES: Final = 16 << 20
"""Copied bytes between two checks of the free space: 2 µs of statvfs for 10 ms of copying."""
_COPY_BYTES: Final = 1 << 20
_UNDO_DIR: Final = b"undo"
_LOCK_STRIPES: Final = 64
# Errors that are taken to hold for every file of the file system: cloning is not tried again.
_CANNOT_CLONE: Final = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL)
_MAX_DIRECTORIES: Final = 4096
"""Limit of directories that were moved since the cut and are kept open: each is a descriptor, and a user can
move any number."""


def _unlink_quietly(directory_fd: int, name: bytes | str) -> bool:
    """Remove a file, and return whether its name is free. One that stays is garbage, removed later."""
    try:
        os.unlink(name, dir_fd=directory_fd)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


class _UndoLogFile:
    """The log in one undo directory; made with its first record. Thread-safe."""

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._log: Descriptor | None = None
        # Held where ``_log`` and the name of the log change: ``_log`` is None or has that name.
        self._lock = threading.Lock()

    def resume(self, log_bytes: int) -> None:
        """Go on behind the first ``log_bytes`` of a predecessor's log.

        Raises:
            OSError: the log cannot be opened or cut.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = Descriptor(os.open(undo_format.LOG_NAME, flags, dir_fd=self._directory_fd))
        # A record that was cut short protects no change: the record comes first.
        os.ftruncate(log.fd, log_bytes)
        self._log = log

    def append(self, record: undo_format.Record) -> int:
        """Write a whole record in one call, visible to readers on return; return its length.

        Raises:
            OSError: the record is not in the log, or not whole.
        """
        log = self._log or self._create()
        data = undo_format.encode(record)
        # One write(2) with O_APPEND: records of several threads lie one behind the other, and a reader finds
        # each whole.
        written = os.write(log.fd, data)
        if written != len(data):
            raise OSError(errno.ENOSPC, "a record of the undo log was cut short")
        return written

    def remove(self) -> bool:
        """Remove the log, and return whether its name is free."""
        with self._lock:
            self._log = None
            return _unlink_quietly(self._directory_fd, undo_format.LOG_NAME)

    def _create(self) -> Descriptor:
        # Two operations may save the first thing of an epoch at one instant. Without the lock the second
        # removed the log of the first, with its record, and a capture that had opened it saw no record at
        # all.
        with self._lock:
            if self._log is None:
                # A log that could not be removed when its epochs ended may end in an incomplete record: it
                # goes first.
                _unlink_quietly(self._directory_fd, undo_format.LOG_NAME)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                fd = os.open(undo_format.LOG_NAME, flags, 0o600, dir_fd=self._directory_fd)
                self._log = Descriptor(fd)
            return self._log


class _UndoSpace:
    """Space of one undo directory. Threads may count at the same time: the figures are estimates."""

    def __init__(self, directory_fd: int, limit_bytes: int) -> None:
        self._directory_fd = directory_fd
        self.limit_bytes = limit_bytes
        self.kept_bytes = 0
        """Space that undo takes on the backing file system, removed files that are kept alive included."""
        self._copied_bytes = 0
        """Part of ``kept_bytes`` that is new on the disk: written by root, and so charged to no user's
        quota."""
        self._checked_at_bytes = 0

    def count(self, size_bytes: int) -> None:
        """Count records and removed files that are kept alive."""
        self.kept_bytes += size_bytes

    def count_copy(self, size_bytes: int) -> None:
        """Count copied content."""
        self.kept_bytes += size_bytes
        self._copied_bytes += size_bytes

    def reset(self) -> None:
        """Start at 0, because everything was removed."""
        self.kept_bytes = self._copied_bytes = self._checked_at_bytes = 0

    def excess(self) -> str | None:
        """Return why the undo log takes too much space, in words; None where it does not."""
        if self.kept_bytes > self.limit_bytes:
            return f"undo log: over its limit of {self.limit_bytes} bytes"
        if self._copied_bytes - self._checked_at_bytes < _ROOM_CHECK_BYTES:
            return None
        # Other users of the file system need its space too, and the owner of a root could fill it past any
        # quota. Files that are kept alive do not count: they were there before.
        self._checked_at_bytes = self._copied_bytes
        if self._copied_bytes > self._free_bytes():
            return f"undo log: its {self._copied_bytes} bytes are more than the file system has left"
        return None

    def has_room_for(self, size_bytes: int) -> bool:
        """Return whether so much more can be saved within the limit and a quarter of the free space."""
        # A copy beyond that would give up the very snapshot that it is made for: the file is captured as
        # found instead, and marked.
        fits = self._copied_bytes + size_bytes <= self._free_bytes() // 4
        return fits and self.kept_bytes + size_bytes <= self.limit_bytes

    def _free_bytes(self) -> int:
        room = os.statvfs(self._directory_fd)
        return room.f_bavail * room.f_frsize


def _data_ranges(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, end) that are not holes.

    A file system without SEEK_DATA calls everything data.
    """
    at = start
    while at < end:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            # No data behind this offset.
            if error.errno == errno.ENXIO:
                return
            raise
        if data >= end:
            return
        hole = os.lseek(fd, data, os.SEEK_HOLE)
        yield max(data, at), min(hole, end)
        at = hole


def _copy_data(fd: int, out: int, start: int, end: int, on_copied: Callable[[int], None]) -> None:
    """Copy [start, end) to the same offsets of another file; holes stay holes.

    Args:
        fd: file to copy from.
        out: file to copy to.
        start: first byte.
        end: byte behind the last one.
        on_copied: called with the length of each piece that was copied.
    """
    for data_start, data_end in _data_ranges(fd, start, end):
        at = data_start
        while at < data_end:
            piece = os.pread(fd, min(_COPY_BYTES, data_end - at), at)
            if not piece:
                break
            write_all(out, piece, at)
            at += len(piece)
            on_copied(len(piece))


def _write_pieces(
    dir_fd: int, name: bytes, pieces: Iterable[bytes | memoryview], size_bytes: int, *, new: bool
) -> int:
    """Write pieces one behind the other into a file of at least ``size_bytes``, and return their total length.

    Args:
        dir_fd: directory of the file.
        name: name of the file.
        pieces: content.
        size_bytes: least length of the file; zeros follow the pieces.
        new: the file is made, and removed again after a failure; a file that lies there is an error.
    """
    made = os.O_CREAT | os.O_EXCL if new else 0
    out = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | made, 0o600, dir_fd=dir_fd)
    at = 0
    try:
        for piece in pieces:
            write_all(out, piece, at)
            at += len(piece)
        if os.fstat(out).st_size < size_bytes:
            # A reader finds zeros where there is no piece, instead of the end of the file.
            os.ftruncate(out, size_bytes)
    except OSError:
        if new:
            with suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
        raise
    finally:
        os.close(out)
    return at


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
        """Open the undo directory below ``state_fd``, emptied unless ``inherit`` and a killed predecessor's can be taken over."""
        self.block_size = block_size
        self.clones = True
        """True if the backing file system shares extents, as far as is known."""
        self._on_abandon = on_abandon
        self._pending: list[int] = []
        self.true_epoch = 0
        """The last sealed epoch, for which everything that is saved now is true."""
        # Guards pending epochs and the files of ended ones. Nothing under it waits for the gate or a stripe.
        self._io = threading.Lock()
        # Striped by inode: saving and changing one inode's content is one step. Reentrant, because saving the
        # blocks of a file saves its attributes too.
        self._locks = tuple(threading.RLock() for _ in range(_LOCK_STRIPES))
        self._kept_directories: dict[int, Descriptor] = {}
        self.max_directories = _MAX_DIRECTORIES
        self._clearing = threading.Lock()
        self._unclean = False
        """True while files of ended epochs are not removed."""
        self._forget_saved()
        self.inherited = self._inherit(state_fd) if inherit else None
        """State that was taken over from a predecessor; None where there was none."""
        if self.inherited is None:
            self._directory = fresh_directory(state_fd, _UNDO_DIR)
            self._log = _UndoLogFile(self._directory.fd)
            hold = fresh_directory(self._directory.fd, undo_format.HOLD_DIR.encode())
        else:
            hold = Descriptor(own_directory(self._directory.fd, undo_format.HOLD_DIR.encode()))
        self.space = _UndoSpace(self._directory.fd, limit_bytes)
        self.hidden = HeldLinks(hold)
        if self.inherited is not None:
            self.hidden.held |= self.inherited.held
            self.space.count(self.inherited.bytes_kept)

    def _inherit(self, state_fd: int) -> InheritedUndo | None:
        """Read what a predecessor saved, and go on where its log ends."""
        directory = Descriptor(own_directory(state_fd, _UNDO_DIR))
        found = read_undo(directory.fd, self.block_size)
        if found is None:
            return None
        log = _UndoLogFile(directory.fd)
        if found.has_log:
            try:
                log.resume(found.log_bytes)
            except OSError:
                return None
        self._directory, self._log = directory, log
        self._pending = [head.epoch for head in found.heads]
        self.true_epoch = found.true_epoch
        self._inodes.update(found.inodes)
        self._names.update(found.names)
        self._blocks.update(found.blocks)
        return found

    @property
    def directory_fd(self) -> int:
        """Descriptor of the undo directory."""
        return self._directory.fd

    def was_deleted(self) -> bool:
        """Return whether another program has deleted a directory in which the log or hidden links lie."""
        return os.fstat(self._directory.fd).st_nlink == 0 or self.hidden.were_deleted()

    def renew(self, state_fd: int) -> None:
        """Make the directories anew below ``state_fd``, under the descriptors that readers know; no epoch is pending.

        Raises:
            OSError: they cannot be made.
        """
        with self._io:
            self._log.remove()
            put_in_place(fresh_directory(state_fd, _UNDO_DIR), self._directory)
            self.hidden.renew(state_fd, self._directory.fd)
            self._unclean = False

    @property
    def pending(self) -> list[int]:
        """Sealed epochs that are neither captured nor given up, oldest first."""
        return list(self._pending)

    @property
    def active(self) -> bool:
        """True while a sealed epoch needs the old state of what is changed now."""
        return bool(self._pending)

    @property
    def takes_space(self) -> bool:
        """True if ``abandon`` and ``tidy`` may free space on the backing file system."""
        return bool(self._pending) or self._unclean

    def lock(self, ino: int) -> threading.RLock:
        """Return the lock under which the content of one inode is saved and changed."""
        return self._locks[ino % _LOCK_STRIPES]

    # -- epochs -------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Begin to save for ``epoch``, which was just sealed.

        Called while the gate is held; takes constant time.
        """
        # Everything saved before is of an older epoch, and is saved once more when it changes again.
        self._pending.append(epoch)
        self.true_epoch = epoch
        self._forget_saved()

    def end(self, epoch: int) -> None:
        """Drop what only ``epoch`` needed, which is captured or was folded into another."""
        with self._io:
            if epoch in self._pending:
                self._pending.remove(epoch)
            self._unclean = True
            _unlink_quietly(self._directory.fd, undo_format.sealed_name(epoch).encode())
            if self._pending:
                return
        self._clear()

    def abandon(self, reason: str) -> None:
        """Give up every sealed epoch, free its space, let the job go on. Never raises."""
        with self._io:
            if not self._pending:
                return
            epochs = self.pending
            # Before saving stops: a reader must not see an unsaved change without this record.
            try:
                self._append(AbandonedRecord(epoch=epochs[-1], reason=reason))
            except OSError:
                # The removal of the log, below, tells the reader instead.
                reason = f"{reason} (and the log could not take a note of it)"
                # Also before saving stops: were this process killed now, its successor must not take these
                # epochs for whole.
                for epoch in epochs:
                    _unlink_quietly(self._directory.fd, undo_format.sealed_name(epoch).encode())
            self._unclean = True
            self._pending = []
        # Outside `_io`, because it folds these epochs into the current one under the lock of Epochs.
        self._on_abandon(epochs, reason)
        for epoch in epochs:
            _unlink_quietly(self._directory.fd, undo_format.sealed_name(epoch).encode())
        self._clear()

    def _forget_saved(self) -> None:
        self._inodes: dict[int, int] = {}
        """Sizes at the end of the last sealed epoch, by saved inode."""
        self._names: set[tuple[int, bytes]] = set()
        self._blocks: dict[int, BlockSet] = {}

    def _clear(self) -> None:
        """Free all space.

        Never raises: what cannot be removed now is left for the next time (``_unclean``).
        """
        try:
            # One at a time: several threads may end epochs and tidy.
            with self._clearing:
                self._clear_all()
        except OSError:
            # Out of descriptors, or the file system has failed or turned read-only: no error of the job's.
            return

    def _clear_all(self) -> None:
        with self._io:
            if self._pending:
                return
            # Not with the files below: a save under way may make a new log meanwhile, which must stay.
            gone = [self._log.remove()]
            self._kept_directories = {}
            self._forget_saved()
            self.space.reset()
            names = os.listdir(self._directory.fd)
            ours = ("blocks-", "new-", "sealed-")
            gone += [
                _unlink_quietly(self._directory.fd, os.fsencode(name))
                for name in names
                if name.startswith(ours)
            ]
        self.hidden.let_all_go(lambda: bool(self._pending))
        self._unclean = not all(gone)

    def tidy(self) -> None:
        """Remove what could not be removed when nothing needed it any more.

        Never raises. No cut may be made meanwhile.
        """
        if self._unclean:
            self._clear()

    # -- saving -------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Turn a failure inside into the end of the sealed epochs: it is no error of the job's."""
        try:
            yield
        except OSError as error:
            self.abandon(f"undo log: {error.strerror or error}")
        else:
            if len(self._kept_directories) > self.max_directories:
                self.abandon(f"undo log: more than {self.max_directories} directories were moved")
            excess = self.space.excess()
            if excess is not None:
                self.abandon(excess)

    def keep_inode(self, st: os.stat_result, target: int | bytes, *, follow: bool = True) -> None:
        """Save attributes and extended attributes, read from ``target`` (a descriptor or path), before they change."""
        # Without the lock first: nearly every change of a saved inode ends here.
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
        # The link before the record: a reader that finds the record finds the inode.
        with self.saving():
            self.space.count(self.hidden.hold(dir_fd, name, st))
            self._keep_name(NameRecord(dir_ino, self.true_epoch, name, st.st_ino, st.st_mode >> 12))

    def keep_directory_name(
        self, dir_ino: int, name: bytes, st: os.stat_result, moved: Descriptor | None
    ) -> None:
        """Save the binding of a name to a directory.

        Args:
            dir_ino: inode number of the directory that has the name.
            name: name to save.
            st: attributes of the directory that the name is bound to.
            moved: descriptor of a directory that goes on to exist elsewhere. A removed one needs none,
                because every name that was in it at the cut has a record by then.
        """
        fd = -1
        if moved is not None:
            # A directory that moves twice keeps its first descriptor, whose number is in the earlier record.
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
        """Return the runs of blocks in the byte range that existed at the cut and are not saved yet.

        The inode is saved already.
        """
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
                if first + count > MAX_BLOCKS:
                    raise OSError(errno.EFBIG, "a file is too large")
                # The copy before its record, and both before the change: a record vouches for the blocks that
                # it names.
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
            _copy_data(fd, out, start, end, self.space.count_copy)
            if os.fstat(out).st_size < end:
                # A reader finds zeros where the old file had a hole, instead of the end of this file.
                os.ftruncate(out, end)
        finally:
            os.close(out)

    def clone_blocks(self, fd: int, ino: int) -> bool:
        """Save every block of the file in constant time, by sharing its extents; return whether that was possible.

        Otherwise nothing is saved. The inode is saved already; the caller holds ``lock(ino)``.
        """
        if not self._pending:
            return True
        size = self._inodes.get(ino, 0)
        if not self.clones or self._blocks.get(ino) is not None or not size:
            # A block that is saved already may have changed since: a clone would have its new content.
            return False
        name = undo_format.blocks_name(ino, self.true_epoch).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            out = os.open(name, flags, 0o600, dir_fd=self._directory.fd)
        except OSError:
            return False
        try:
            syscalls.clone_file(out, fd)
        except OSError as error:
            _unlink_quietly(self._directory.fd, name)
            self.clones = error.errno not in _CANNOT_CLONE
            return False
        finally:
            os.close(out)
        first, count = blocks_of(0, size, self.block_size)
        with self.saving():
            self._append(BlocksRecord(ino, self.true_epoch, first, count))
            self._blocks.setdefault(ino, BlockSet()).add_range(first, count)
        return True

    def keep_copy(self, ino: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Save the content that a file had at the cut, which the caller copied to memory under the hold.

        The inode is saved already, the caller holds ``lock(ino)``. Blocks that were saved since the hold are
        overwritten: they are later than the cut.

        Raises:
            OSError: there is no room, and nothing of the copy counts.
        """
        size = self._inodes.get(ino, 0)
        if not self._pending or not size:
            return
        name = undo_format.blocks_name(ino, self.true_epoch).encode()
        written = _write_pieces(self._directory.fd, name, pieces, size, new=ino not in self._blocks)
        first, count = blocks_of(0, size, self.block_size)
        with self.saving():
            self.space.count_copy(written)
            self._append(BlocksRecord(ino, self.true_epoch, first, count))
            self._blocks.setdefault(ino, BlockSet()).add_range(first, count)

    def create_replacement(self, ino: int) -> tuple[int, bytes]:
        """Make an empty file in the undo directory, to take the name of inode ``ino``; return its descriptor and name there."""
        name = b"new-%d" % ino
        # Left by a swap on a failing disk (core/overlay_hooks.py).
        _unlink_quietly(self._directory.fd, name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._directory.fd), name

    def _append(self, record: undo_format.Record) -> None:
        """Write a record; it is visible to readers on return."""
        self.space.count(self._log.append(record))
