"""The driver of our own session with the kernel: decodes requests, has the overlay core carry them out, encodes answers.

Guarantees: no rule of POSIX is decided here; every request that a kernel up to 7.45 sends to a server that
does not keep locks is either carried out or refused with ENOSYS, which the kernel remembers where that saves
requests. A handle is in the journal (`HandleJournal`) before the kernel is told of it, so that a successor can go
on with it; an open that comes again opens nothing twice; one whose caller was killed is closed.

Every change passes through the worker, so names and attributes that the kernel caches stay true until it changes
them itself: they live for a day, but for those that change without a request (a file that is open for writing, a
set-id bit that a write takes away) and those of directories that changed lately (state/passthrough_state.py).

``OpenModes`` decides how data reach the backing file; threads and replies are the session's (session.py).

Path of an open file's data: from kernel to backing file, through this process, or through the kernel's page cache.

The kernel lets opens of one inode coexist only within one *family* (fs/fuse/iomode.c): either all of them are
backed by the same backing file (passthrough), or none is. The first open decides, until the last one is
closed. docs/decisions/families-of-opens.md has the table of combinations that the kernel refuses.

* **passthrough** (FOPEN_PASSTHROUGH): reads, writes and mappings go to the backing file and its page cache
  without us. For readers, and for writers of new content: created or emptied by this open, write-only, not
  appending. Every checkpoint is one. Changes of such a writer are *unseen*: the file counts as wholly dirty
  for as long as it is open.
* **tracked** (with FOPEN_DIRECT_IO as well): read and write come to us, mappings go to the backing file. For
  write-only opens of existing content, which cannot be mapped: logs, updates in place. Every change is seen.
* **cached** (neither): all data come to us by way of the kernel's cache, written through; stores through a
  mapping come when the kernel writes them back, at the latest at a flush. For read-write opens, which may be
  mapped, so that databases are exact at a cut. Where the file is in the passthrough family already, a
  read-write open has to join it: tracked, but unseen because of the mappings that it may have, which outlive
  its close.

Rules (open_rules.py) take single files out of this: logs that are made and kept open are tracked from their
first open on, and databases are cached although a reader opens them first.

Without passthrough everything is cached. Backing ids: one for each inode of the passthrough family, from the
first open to the last release.

The directory `.snapshots` at the top of a root: made for a mount of the root's snapshots, and found by nobody else.

Nothing on disk belongs to it, so it is never listed, captured or compared. Only the thread that is to mount on it finds it, once. The
kernel remembers the name from then on, and leads everybody who walks over it to the mount without asking the worker. It asks again for
that name where a program is about to make it or to rename something to it (LOOKUP_EXCL, LOOKUP_RENAME_TARGET): then the name is
free, the kernel takes the mount away, and the program gets the name.

The kernel is never told that the name is free: such a notice waits for the lock of the root's directory, uninterruptibly, and a worker that was
killed meanwhile could not end, nor be replaced, before the job's operation that holds the lock; and that waits for a successor. Once the
directory is hidden, requests about it end with ESTALE instead, after which the kernel asks for its name.

Guarantees: a worker that is replaced knows all there is to know, because the node has a number of its own. Nobody who reaches the directory
where nothing is mounted on it (in another mount namespace) can change it; it is empty.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import XATTR_CREATE
from typing import Any, Final, NamedTuple

import structlog

from ciuic import SNAPSHOTS_DIR_NAME
from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.directories import UNKNOWN_NUMBER, Fitting, ListingHabits
from ciuic.fuse_layer.core.files import SetAttr
from ciuic.fuse_layer.core.passthrough_core import DriverHooks, PassthroughCore
from ciuic.fuse_layer.fuse_protocol import FuseRequest
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.journal.journal_writer import HandleJournal, JournalWriter
from ciuic.fuse_layer.journal.records import OpenedDirectory, OpenedFile
from ciuic.fuse_layer.kernel.session import MAX_THREADS, KernelSession, Negotiated, Reply
from ciuic.fuse_layer.state.node_table import ROOT_ID, SNAPSHOTS_ID
from ciuic.fuse_layer.state.open_rules import OpenPreference
from ciuic.fuse_layer.state.passthrough_state import LIFE_NS, Attr, RecentChanges
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.caller import Credentials, is_outside, shown_attributes
from ciuic.fuse_layer.system.pipes import MAX_SPLICED_BYTES, MIN_SPLICED_BYTES
from ciuic.fuse_layer.system.syscalls import Statx

log = structlog.get_logger(__name__)

_LOCK_STRIPES: Final = 64


class OpenPlan(NamedTuple):
    """Flags with which an open is to be answered."""

    open_flags: int
    unseen: bool
    """True if writes may reach the backing file past the worker."""

    @property
    def passthrough(self) -> bool:
        """True if the open belongs to the passthrough family."""
        return bool(self.open_flags & p.FOPEN_PASSTHROUGH)


class _Family:
    __slots__ = ("backing_id", "opens")

    def __init__(self, backing_id: int | None) -> None:
        self.backing_id = backing_id
        """Backing id of the passthrough family; None for the cached family."""
        self.opens = 0


class OpenModes:
    """The open inodes of one connection and their families.

    Thread-safe; ``lock`` is held from plan to commit.
    """

    def __init__(self, fuse_fd: int, *, passthrough: bool) -> None:
        self._fd = fuse_fd
        self.passthrough = passthrough
        self._families: dict[int, _Family] = {}
        # Held from plan to commit: two first opens of one inode must not decide for different families.
        self._locks = tuple(threading.Lock() for _ in range(_LOCK_STRIPES))

    def inherit(self, files: Iterable[OpenedFile]) -> None:
        """Take over the families and backing ids of a predecessor's open files, which the kernel still has."""
        for opened in files:
            family = self._families.setdefault(opened.node, _Family(opened.backing_id or None))
            family.opens += 1

    def lock(self, node_id: int) -> threading.Lock:
        """Return the lock of a node, to be held from ``plan`` to ``commit``."""
        return self._locks[node_id % _LOCK_STRIPES]

    def plan(
        self, node_id: int, flags: int, *, fresh: bool, preference: OpenPreference = OpenPreference.ANY
    ) -> OpenPlan:
        """Choose the flags of an open.

        Args:
            node_id: node that is opened.
            flags: flags of the program's open(2).
            fresh: the file is empty, made or emptied by this open.
            preference: choice of the rules (open_rules.py), followed where the family allows it.
        """
        family = self._families.get(node_id)
        # Opens that exist decide, also when passthrough was refused meanwhile for another file.
        if (family is None and not self.passthrough) or (family is not None and family.backing_id is None):
            # All data of this family pass through the kernel's cache, so what is cached stays true.
            return OpenPlan(p.FOPEN_KEEP_CACHE, unseen=False)
        if family is None and preference is OpenPreference.CACHED:
            # Without FOPEN_KEEP_CACHE, as below.
            return OpenPlan(0, unseen=False)
        access = flags & os.O_ACCMODE
        if access == os.O_RDONLY:
            return OpenPlan(p.FOPEN_PASSTHROUGH, unseen=False)
        if access == os.O_WRONLY:
            if fresh and not flags & os.O_APPEND and preference is not OpenPreference.TRACKED:
                return OpenPlan(p.FOPEN_PASSTHROUGH, unseen=True)
            return OpenPlan(p.FOPEN_PASSTHROUGH | p.FOPEN_DIRECT_IO, unseen=False)
        if family is not None:
            return OpenPlan(p.FOPEN_PASSTHROUGH | p.FOPEN_DIRECT_IO, unseen=True)
        # Not FOPEN_KEEP_CACHE: pages cached before may be older than data that was written by passthrough
        # since.
        return OpenPlan(0, unseen=False)

    def appending(self, plan: OpenPlan) -> OpenPlan:
        """Return the plan of an open that writes an append-only inode.

        Raises:
            OSError: EPERM where the program could map the backing file, past the flag: the kernel looks for
                it at its own inode.
        """
        if plan.passthrough:
            if plan.unseen:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return plan
        # The write cache sends whole pages, also what they had before.
        return OpenPlan(p.FOPEN_DIRECT_IO, unseen=False)

    def commit(self, node_id: int, plan: OpenPlan, fd: int) -> tuple[OpenPlan, int]:
        """Count the open; return its plan and its backing id (0 for none).

        The plan becomes a cached one when the kernel refuses the backing file; never when the family is
        decided already.
        """
        family = self._families.get(node_id)
        if family is None:
            backing_id = self._backing_open(fd) if plan.passthrough else None
            if plan.passthrough and backing_id is None:
                plan = OpenPlan(0, unseen=False)
            family = self._families[node_id] = _Family(backing_id)
        family.opens += 1
        return plan, family.backing_id or 0

    def released(self, node_id: int) -> None:
        """Note that an open which was committed is over."""
        # An open between plan and commit relies on the family: it must not end in between.
        with self.lock(node_id):
            family = self._families.get(node_id)
            if family is None:
                return
            family.opens -= 1
            if family.opens:
                return
            del self._families[node_id]
            if family.backing_id is not None:
                self._ioctl(p.DEV_IOC_BACKING_CLOSE, bytearray(p.BACKING_ID.pack(family.backing_id)))

    def is_passthrough(self, node_id: int) -> bool:
        """Return whether the kernel holds the inode's backing file, so that the node must not be given another inode."""
        family = self._families.get(node_id)
        return family is not None and family.backing_id is not None

    def _backing_open(self, fd: int) -> int | None:
        try:
            return self._ioctl(p.DEV_IOC_BACKING_OPEN, bytearray(p.BACKING_MAP.pack(fd, 0, 0)))
        except OSError as error:
            # These errors hold for every file of the root.
            if error.errno in (errno.EPERM, errno.ELOOP, errno.ENOTTY):
                log.warning("passthrough_refused", error=str(error))
                self.passthrough = False
            return None

    def _ioctl(self, request: int, argument: bytearray) -> int:
        # Python returns the call's result, which is the id, only when the buffer may be written to.
        result = fcntl.ioctl(self._fd, request, argument, True)
        assert isinstance(result, int)
        return result


# The kernel takes it for the largest number of ticks that there is. A name that ends before would be asked for by readers.
_FOR_EVER_SECONDS: Final = (1 << 63) - 1
_BLOCK_BYTES: Final = 4096
_ATTR: Final = p.ATTR.pack(
    *(SNAPSHOTS_ID, _BLOCK_BYTES, 0, 0, 0, 0, 0, 0, 0),
    *(stat.S_IFDIR | 0o555, 2, 0, 0, 0, _BLOCK_BYTES, 0),
)
_ENTRY: Final = p.ENTRY_HEAD.pack(SNAPSHOTS_ID, 0, _FOR_EVER_SECONDS, 0, 0, 0) + _ATTR
_STATX_BASIC: Final = 0x7FF
_STATX: Final = p.STATX_OUT_HEAD.pack(0, 0, 0) + p.STATX_STRUCT.pack(
    *(_STATX_BASIC, _BLOCK_BYTES, 0, 2, 0, 0, stat.S_IFDIR | 0o555),
    *(SNAPSHOTS_ID, _BLOCK_BYTES, 0, 0),
    *(0,) * 12,
)


class SnapshotsDirectory:
    """Requests about the directory of one root. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        # A successor does not know, and an empty directory does no harm.
        self._is_hidden = False

    def show_to(self, thread: int) -> None:
        """Let the thread of this number find it at its next lookup; 0: nobody, and it is gone for those who have found it."""
        with self._lock:
            self._thread = thread
            self._is_hidden = not thread

    def entry_for(self, thread: int) -> bytes | None:
        """Return the entry for a thread that looks the name up; None for one that is not to find it."""
        # Without the lock first: every lookup of the name comes here.
        if not thread or thread != self._thread:
            return None
        with self._lock:
            if thread != self._thread:
                return None
            self._thread = 0
        return _ENTRY

    def answer(self, request: FuseRequest, data: memoryview) -> Reply:
        """Answer a request about the directory itself, or about a name in it.

        Raises:
            OSError: EROFS for one that would change something, ESTALE when it is hidden.
        """
        if self._is_hidden and request.opcode != p.RELEASEDIR:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        match request.opcode:
            case p.GETATTR:
                return p.ATTR_HEAD.pack(0, 0, 0) + _ATTR
            case p.STATX:
                return _STATX
            case p.OPENDIR:
                return p.OPEN_OUT.pack(0, 0, 0)
            case p.READDIR | p.READDIRPLUS:
                return _dots(data, b"" if request.opcode == p.READDIR else _NO_ENTRY)
            case p.RELEASEDIR:
                return b""
            case p.LISTXATTR:
                size, _ = p.GETXATTR_IN.unpack_from(data)
                return p.sized(size, b"")
            case p.LOOKUP:
                number = errno.ENOENT
            case p.GETXATTR:
                number = errno.ENODATA
            case _:
                number = errno.EROFS
        raise OSError(number, os.strerror(number))


def _dots(data: memoryview, before: bytes) -> bytes:
    _, offset, *_ = p.READ_IN.unpack_from(data)
    names = ((b".", SNAPSHOTS_ID), (b"..", ROOT_ID))
    return b"".join(
        before + p.pack_dirent(node, stat.S_IFDIR, index, name)
        for index, (name, node) in enumerate(names[offset:], offset + 1)
    )


FOREVER_SECONDS: Final = 86_400
_WRITTEN_NS: Final = 100_000_000
"""Life of the attributes of a file that is open for writing: mappings change times and blocks without a
request."""
_MIN_BLOCKS: Final = 8
"""Blocks of a file that is being written, at least: archivers take a file without blocks for a single
hole."""
ABSENT: Final = p.ENTRY_HEAD.pack(0, 0, FOREVER_SECONDS, 0, 0, 0) + bytes(p.ATTR.size)
"""Entry of a name that is free, which the kernel remembers until it creates the name itself."""
_SET_IDS: Final = stat.S_ISUID | stat.S_ISGID
_ATTRIBUTES: Final = (
    p.FATTR_MODE | p.FATTR_UID | p.FATTR_GID | p.FATTR_SIZE
    | p.FATTR_ATIME | p.FATTR_MTIME | p.FATTR_ATIME_NOW | p.FATTR_MTIME_NOW
)  # fmt: skip
"""Flags of SETATTR that name an attribute."""
_CACHED_LISTING: Final = p.FOPEN_CACHE_DIR | p.FOPEN_KEEP_CACHE
"""Flags of an open directory: the kernel keeps a listing until it changes the directory itself (by counter,
not by time)."""
_NO_ENTRY: Final = bytes(p.ENTRY_HEAD.size + p.ATTR.size)
# O_TMPFILE contains O_DIRECTORY.
_TMPFILE_BIT: Final = os.O_TMPFILE & ~os.O_DIRECTORY
_SHIFTS_BLOCKS: Final = syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE


def _fitting(head_bytes: int, room: int) -> Fitting:
    """Return a function that tells how many names a reply of ``room`` bytes has room for, each behind ``head_bytes``."""

    def end(names: Sequence[bytes], offset: int) -> int:
        left = room
        while offset < len(names):
            length = len(names[offset])
            left -= head_bytes + length + -length % 8
            if left < 0:
                break
            offset += 1
        return offset

    return end


class _ReplyEncoder:
    """Encoder of one connection's answers. ``writeback``: the kernel's write cache is on."""

    def __init__(self, recent: RecentChanges, *, writeback: bool) -> None:
        self._recent = recent
        self._writeback = writeback

    def _lives(self, attr: Attr, *, written: bool = False) -> tuple[int, int, bytes]:
        """Return the life of the attributes (seconds, nanoseconds), and struct fuse_attr."""
        st = attr.st
        seconds, nanoseconds, blocks = FOREVER_SECONDS, 0, st.st_blocks
        if stat.S_ISDIR(st.st_mode) and attr.node in self._recent:
            seconds, nanoseconds = 0, LIFE_NS
        if stat.S_ISREG(st.st_mode):
            if attr.written or written:
                seconds, nanoseconds = 0, _WRITTEN_NS
                if self._writeback:
                    # Its data may not have been written back yet.
                    blocks = max(blocks, _MIN_BLOCKS)
            if st.st_mode & _SET_IDS:
                # A write takes these bits away, and the kernel is not told.
                seconds = nanoseconds = 0
        return seconds, nanoseconds, p.pack_attr(attr.node, st, attr.nlink, blocks)

    def entry(self, attr: Attr, *, written: bool = False) -> bytes:
        """Encode struct fuse_entry_out; ``written``: the file is being opened for writing just now."""
        seconds, nanoseconds, packed = self._lives(attr, written=written)
        head = p.ENTRY_HEAD.pack(attr.node, attr.generation, FOREVER_SECONDS, seconds, 0, nanoseconds)
        return head + packed

    def attributes(self, attr: Attr) -> bytes:
        """Encode struct fuse_attr_out."""
        seconds, nanoseconds, packed = self._lives(attr)
        return p.ATTR_HEAD.pack(seconds, nanoseconds, 0) + packed

    def statx(self, attr: Attr, extra: Statx) -> bytes:
        """Encode struct fuse_statx_out."""
        seconds, nanoseconds, _packed = self._lives(attr)
        st = attr.st
        times = [divmod(ns, 10**9) for ns in (st.st_atime_ns, extra.btime_ns, st.st_ctime_ns, st.st_mtime_ns)]
        return p.STATX_OUT_HEAD.pack(seconds, nanoseconds, 0) + p.STATX_STRUCT.pack(
            *(extra.mask, st.st_blksize, extra.attributes, attr.nlink, st.st_uid, st.st_gid, st.st_mode),
            *(attr.node, st.st_size, st.st_blocks, extra.attributes_mask),
            *(number for time in times for number in time),
            *(os.major(st.st_rdev), os.minor(st.st_rdev), os.major(st.st_dev), os.minor(st.st_dev)),
        )


def _packed_statfs(vfs: os.statvfs_result) -> bytes:
    """Encode struct fuse_statfs_out."""
    return p.KSTATFS.pack(
        *(vfs.f_blocks, vfs.f_bfree, vfs.f_bavail, vfs.f_files, vfs.f_ffree),
        *(vfs.f_bsize, vfs.f_namemax, vfs.f_frsize),
    )


# Others that name its node end with EROFS (`NodeTable.get`).
_OF_SNAPSHOTS_DIRECTORY: Final = (
    *(p.LOOKUP, p.GETATTR, p.STATX, p.GETXATTR, p.LISTXATTR),
    *(p.OPENDIR, p.READDIR, p.READDIRPLUS, p.RELEASEDIR),
)


class KernelDriver:
    """Driver of the connection ``fuse_fd`` for ``core``."""

    def __init__(
        self,
        core: PassthroughCore,
        fuse_fd: int,
        negotiated: Negotiated,
        *,
        journal: JournalWriter | None = None,
        inherited: InheritedSession | None = None,
    ) -> None:
        self.core = core
        self.modes = OpenModes(fuse_fd, passthrough=negotiated.passthrough)
        self.handle_journal = HandleJournal(journal, inherited)
        if inherited is not None:
            self.modes.inherit(inherited.files.values())
        core.connect(
            DriverHooks(
                before_freeing=lambda: self.session.hand_on(),
                on_listing=self.handle_journal.listed,
                take_back_attributes=lambda node_id: self.session.invalidate_attributes(node_id),
                held_by_kernel=self.modes.is_passthrough,
            )
        )
        self._negotiated = negotiated
        self._writeback = negotiated.writeback
        # Not in a session of a predecessor that agreed on writes which no pipe holds: the kernel would fail them.
        self._splices = negotiated.writeback and negotiated.max_write_bytes <= MAX_SPLICED_BYTES
        self._encoder = _ReplyEncoder(core.recent, writeback=negotiated.writeback)
        self._habits = ListingHabits()
        self.snapshots_directory = SnapshotsDirectory()
        self.session = KernelSession(
            fuse_fd,
            self._handlers(),
            # chattr, fs-verity and project quota change what the overlay could neither track nor restore.
            refused={p.IOCTL: errno.ENOTTY},
            unread={
                p.OPEN: self._unopened,
                p.CREATE: self._uncreated,
                p.TMPFILE: self._uncreated,
                p.OPENDIR: self._unopened_directory,
            },
        )

    def answer_opens(self, inherited: InheritedSession) -> None:
        """Answer the opens that a predecessor carried out and did not answer; before the kernel sends them again.

        A program that was killed in between would have its request sent to nobody, and its handle would stay open for ever.
        """
        newest = sorted(inherited.files.values(), key=lambda opened: opened.unique)[-MAX_THREADS:]
        for opened in newest:
            if self.core.files.has(opened.handle):
                is_create = opened.flags & (os.O_CREAT | _TMPFILE_BIT)
                # With the attributes of a file that is gone meanwhile, the request is left to the kernel.
                with suppress(OSError):
                    reply = self._created_before(opened) if is_create else _opened_reply(opened)
                    self.session.answer_for_predecessor(opened.unique, reply)
        for directory in sorted(inherited.directories.values(), key=lambda opened: opened.unique)[
            -MAX_THREADS:
        ]:
            if self.core.directories.has(directory.handle):
                # Without the right to read the kernel's copy: this process's handles have it.
                reply = p.OPEN_OUT.pack(directory.handle, p.FOPEN_KEEP_CACHE, 0)
                self.session.answer_for_predecessor(directory.unique, reply)

    def _handlers(self) -> Mapping[int, Any]:
        handlers = self._core_handlers()
        for opcode in _OF_SNAPSHOTS_DIRECTORY:
            handlers[opcode] = self._unless_of_snapshots(handlers[opcode])
        return handlers

    def _unless_of_snapshots(
        self, handler: Callable[[FuseRequest, memoryview], Reply]
    ) -> Callable[[FuseRequest, memoryview], Reply]:
        def handle(request: FuseRequest, data: memoryview) -> Reply:
            if request.node == SNAPSHOTS_ID:
                return self.snapshots_directory.answer(request, data)
            return handler(request, data)

        return handle

    def _core_handlers(self) -> dict[int, Any]:
        return {
            p.LOOKUP: self._lookup,
            p.FORGET: self._forget,
            p.BATCH_FORGET: self._batch_forget,
            p.GETATTR: self._getattr,
            p.SETATTR: self._setattr,
            p.READLINK: self._readlink,
            p.SYMLINK: self._symlink,
            p.MKNOD: self._mknod,
            p.MKDIR: self._mkdir,
            p.UNLINK: self._unlink,
            p.RMDIR: self._rmdir,
            p.RENAME: self._rename,
            p.RENAME2: self._rename2,
            p.LINK: self._link,
            p.STATFS: self._statfs,
            p.SETXATTR: self._setxattr,
            p.GETXATTR: self._getxattr,
            p.LISTXATTR: self._listxattr,
            p.REMOVEXATTR: self._removexattr,
            p.OPEN: self._open,
            p.CREATE: self._create,
            p.TMPFILE: self._tmpfile,
            p.READ: self._read,
            p.WRITE: self._write,
            p.RELEASE: self._release,
            p.FSYNC: self._fsync,
            # Without the write cache there is nothing to flush. The kernel remembers ENOSYS, which saves a
            # request for each close(2).
            **({p.FLUSH: self._flush} if self._writeback else {}),
            p.OPENDIR: self._opendir,
            p.READDIR: self._readdir,
            p.READDIRPLUS: self._readdirplus,
            p.RELEASEDIR: self._releasedir,
            p.FSYNCDIR: self._fsyncdir,
            p.FALLOCATE: self._fallocate,
            p.LSEEK: self._lseek,
            p.COPY_FILE_RANGE: self._copy_file_range,
            p.COPY_FILE_RANGE_64: self._copy_file_range_64,
            p.SYNCFS: self._syncfs,
            p.STATX: self._statx,
            p.DESTROY: lambda request, data: b"",
        }

    def share(self, node: int, source_fd: int, source_offset: int, offset: int, length: int) -> None:
        """Share extents as the core does, and then have the kernel drop its cache of the range.

        Not for the session's threads.
        """
        self.core.files.share(node, source_fd, source_offset, offset, length)
        self.session.invalidate_content(node, offset, length)

    # -- names and attributes -------------------------------------------------------------------------

    def _lookup(self, request: FuseRequest, data: memoryview) -> Reply:
        # A program that looks up what it lists gets attributes with its next listings (`ListingHabits`).
        self._habits.looked_up(request.pid, request.node)
        try:
            return self._encoder.entry(self.core.names.lookup(request.node, bytes(data[:-1])))
        except FileNotFoundError:
            if request.node == ROOT_ID and data[:-1] == SNAPSHOTS_DIR_NAME:
                return self.snapshots_directory.entry_for(request.pid) or ABSENT
            # An entry without a node and not ENOENT, which the kernel would not remember.
            return ABSENT

    def _forget(self, request: FuseRequest, data: memoryview) -> Reply:
        self.core.nodes.forget(request.node, *p.FORGET_IN.unpack_from(data))
        return None

    def _batch_forget(self, request: FuseRequest, data: memoryview) -> Reply:
        count, _ = p.BATCH_FORGET_IN.unpack_from(data)
        at = p.BATCH_FORGET_IN.size
        self.core.nodes.forget_all(p.FORGET_ONE.iter_unpack(data[at : at + count * p.FORGET_ONE.size]))
        return None

    def _getattr(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, _, handle = p.GETATTR_IN.unpack_from(data)
        return self._encoder.attributes(
            self.core.attributes.getattr(request.node, handle if flags & p.GETATTR_FH else None)
        )

    def _statx(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, _, handle, _sync, mask = p.STATX_IN.unpack_from(data)
        attr, extra = self.core.attributes.statx(request.node, handle if flags & p.GETATTR_FH else None, mask)
        return self._encoder.statx(attr, extra)

    def _setattr(self, request: FuseRequest, data: memoryview) -> Reply:
        fields = p.SETATTR_IN.unpack_from(data)
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = fields
        change = SetAttr(
            mode=mode & 0o7777 if valid & p.FATTR_MODE else None,
            uid=uid if valid & p.FATTR_UID else None,
            gid=gid if valid & p.FATTR_GID else None,
            size=size if valid & p.FATTR_SIZE else None,
            atime_ns=_nanoseconds(atime, atime_ns) if valid & p.FATTR_ATIME else None,
            mtime_ns=_nanoseconds(mtime, mtime_ns) if valid & p.FATTR_MTIME else None,
            atime_now=bool(valid & p.FATTR_ATIME_NOW),
            mtime_now=bool(valid & p.FATTR_MTIME_NOW),
            keeps_privileges=not valid & p.FATTR_KILL_SUIDGID,
        )
        # A request without any attribute is chown(2) with -1 for both.
        if not valid & _ATTRIBUTES:
            change = SetAttr(chown_by=request.uid)
        if change.size is not None:
            # Freeing the blocks of a large file takes seconds on some file systems.
            self.session.hand_on()
        return self._encoder.attributes(
            self.core.attributes.setattr(request.node, change, handle if valid & p.FATTR_FH else None)
        )

    def _readlink(self, request: FuseRequest, data: memoryview) -> Reply:
        return self.core.names.readlink(request.node)

    def _labels(self, request: FuseRequest, data: memoryview) -> tuple[tuple[bytes, bytes], ...]:
        """Return the security contexts that a new inode is to be given (SELinux)."""
        if not request.extension_bytes:
            return ()
        return tuple(p.security_contexts(bytes(data[len(data) - request.extension_bytes :])))

    def _made(self, request: FuseRequest, data: memoryview, attr: Attr, *, written: bool = False) -> bytes:
        for name, value in self._labels(request, data):
            self.core.attributes.setxattr(attr.node, name, value, 0)
        return self._encoder.entry(attr, written=written)

    def _symlink(self, request: FuseRequest, data: memoryview) -> Reply:
        name, target = p.names_of(data, 2)
        caller = Credentials(request.uid, request.gid, 0)
        return self._once(
            request, data, name, lambda: self.core.names.symlink(request.node, name, target, caller)
        )

    def _mknod(self, request: FuseRequest, data: memoryview) -> Reply:
        mode, rdev, umask, _ = p.MKNOD_IN.unpack_from(data)
        name = p.name_of(data[p.MKNOD_IN.size :])
        caller, device = Credentials(request.uid, request.gid, umask), p.user_device(rdev)
        return self._once(
            request, data, name, lambda: self.core.names.mknod(request.node, name, mode, device, caller)
        )

    def _mkdir(self, request: FuseRequest, data: memoryview) -> Reply:
        mode, umask = p.MKDIR_IN.unpack_from(data)
        name = p.name_of(data[p.MKDIR_IN.size :])
        caller = Credentials(request.uid, request.gid, umask)
        return self._once(
            request, data, name, lambda: self.core.names.mkdir(request.node, name, mode, caller)
        )

    def _once(self, request: FuseRequest, data: memoryview, name: bytes, make: Callable[[], Attr]) -> bytes:
        """Make a name, once even if the request comes again, and answer with its entry."""
        # The kernel holds the directory locked while it waits, and knew that the name was free: a name that
        # is there when the request comes again was made by the predecessor.
        try:
            attr = make()
        except FileExistsError:
            if not request.resent:
                raise
            attr = self.core.names.lookup(request.node, name)
        try:
            return self._made(request, data, attr)
        except BaseException:
            # The answer is an error, with which the kernel counts no lookup.
            self.core.nodes.forget(attr.node, 1)
            raise

    def _gone(self, request: FuseRequest, remove: Callable[[], None]) -> bytes:
        """Remove or move a name, once even if the request comes again."""
        # As in ``_once``: a name that is not there any more was removed by the predecessor.
        try:
            remove()
        except FileNotFoundError:
            if not request.resent:
                raise
        return b""

    def _unlink(self, request: FuseRequest, data: memoryview) -> Reply:
        return self._gone(request, lambda: self.core.names.unlink(request.node, p.name_of(data)))

    def _rmdir(self, request: FuseRequest, data: memoryview) -> Reply:
        return self._gone(request, lambda: self.core.names.rmdir(request.node, p.name_of(data)))

    def _rename(self, request: FuseRequest, data: memoryview) -> Reply:
        (target,) = p.RENAME_IN.unpack_from(data)
        old, new = p.names_of(data[p.RENAME_IN.size :], 2)
        return self._gone(request, lambda: self.core.names.rename(request.node, old, target, new, 0))

    def _rename2(self, request: FuseRequest, data: memoryview) -> Reply:
        target, flags, _ = p.RENAME2_IN.unpack_from(data)
        old, new = p.names_of(data[p.RENAME2_IN.size :], 2)
        if flags & syscalls.RENAME_EXCHANGE:
            return self._exchange(request, old, target, new, flags)
        return self._gone(request, lambda: self.core.names.rename(request.node, old, target, new, flags))

    def _exchange(self, request: FuseRequest, old: bytes, target: int, new: bytes, flags: int) -> bytes:
        """Exchange two names, once even if the request comes again."""
        # Both names are there before and after: the inode of the first before tells whether the exchange was
        # carried out.
        unique = request.unique & ~p.UNIQUE_RESEND
        bound_to = self.core.names.peek(request.node, old)
        intended = self.handle_journal.intents.get(unique) if request.resent else None
        # Without a note the predecessor died before the exchange. This process notes it for its own
        # successor.
        if intended is None:
            self.handle_journal.intends(unique, bound_to)
        elif intended != bound_to:
            # Carried out. The lookups tell the node table of it.
            for parent, name in ((request.node, old), (target, new)):
                self.core.nodes.forget(self.core.names.lookup(parent, name).node, 1)
            return b""
        self.core.names.rename(request.node, old, target, new, flags)
        return b""

    def _link(self, request: FuseRequest, data: memoryview) -> Reply:
        (node,) = p.LINK_IN.unpack_from(data)
        name = p.name_of(data[p.LINK_IN.size :])
        return self._once(request, data, name, lambda: self.core.names.link(node, request.node, name))

    # -- files ----------------------------------------------------------------------------------------

    def _open(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, open_flags = p.OPEN_IN.unpack_from(data)
        node = request.node
        before, lost = self._opened_before(request)
        if before is not None:
            return _opened_reply(before)
        if lost:
            # The predecessor has truncated the file, and others may have written since.
            flags &= ~os.O_TRUNC
        fresh = bool(flags & os.O_TRUNC)
        # Emptying a file of which a sealed epoch needs the content may copy it.
        if fresh and self.core.pending:
            self.session.hand_on()
        # From plan to commit under the node's lock: the kernel answers EIO to the job where families are
        # mixed.
        with self.modes.lock(node):
            plan = self.modes.plan(
                node, flags, fresh=fresh, preference=self._preference(node, flags, fresh=fresh)
            )
            handle = self.core.files.open(
                node,
                flags,
                keeps_privileges=not open_flags & p.OPEN_KILL_SUIDGID,
                unseen=plan.unseen,
                uid=request.uid,
            )
            return self._opened(request, node, handle, plan, flags)

    def _preference(self, node: int, flags: int, *, fresh: bool) -> OpenPreference:
        """Return the rules' preference for an open whose family is not decided, or that may pass the worker by."""
        if not self.modes.passthrough or (self.modes.is_passthrough(node) and not fresh):
            return OpenPreference.ANY
        return self.core.preference(node, flags, fresh=fresh)

    def _opened_before(self, request: FuseRequest) -> tuple[OpenedFile | None, bool]:
        """Return the file that a predecessor opened for a request that comes again, and whether its handle was lost.

        A handle is lost that this process could not open again. The kernel was not told of it: it is given
        up, and another one is opened.
        """
        before = self.handle_journal.file_of(request.unique & ~p.UNIQUE_RESEND) if request.resent else None
        if before is None or self.core.files.has(before.handle):
            return before, False
        self._let_go(before.node, before.handle)
        return None, True

    def _opened(self, request: FuseRequest, node: int, handle: int, plan: OpenPlan, flags: int) -> bytes:
        write_only = flags & os.O_ACCMODE == os.O_WRONLY
        try:
            if self.core.files.appends(handle):
                plan = self.modes.appending(plan)
            if plan.open_flags & p.FOPEN_KEEP_CACHE and not self.core.files.keeps_cache(handle):
                plan = OpenPlan(0, unseen=False)
            final, backing_id = self.modes.commit(node, plan, self.core.files.descriptor(handle))
            if final is not plan:
                self.core.files.is_seen(handle)
            elif final.unseen and not write_only:
                self.core.note_joined(node)
            if final.passthrough or (write_only and not self._writeback):
                self.core.files.needs_no_flush(handle)
        except BaseException:
            self.core.files.release(handle)
            raise
        # In the journal before the answer: from then on the kernel uses the handle, also in a successor's
        # time.
        unique = request.unique & ~p.UNIQUE_RESEND
        self.handle_journal.opened(
            OpenedFile(handle, node, unique, flags, final.open_flags, backing_id, request.uid)
        )
        if self._writeback and flags & os.O_ACCMODE != os.O_RDONLY:
            # Attributes that the kernel has cached live long; those of a file that is written live shortly
            # (`_ReplyEncoder`).
            self.session.invalidate_attributes(node)
        return p.OPEN_OUT.pack(handle, final.open_flags, backing_id)

    def _create(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, mode, umask, _ = p.CREATE_IN.unpack_from(data)
        name = p.name_of(data[p.CREATE_IN.size :])
        before, _ = self._opened_before(request)
        if before is not None:
            return self._created_before(before)
        if request.resent:
            # A file that is there was made by the predecessor, and empty then.
            flags &= ~(os.O_EXCL | os.O_TRUNC)
        attr, handle = self.core.names.create(
            request.node, name, mode, flags, Credentials(request.uid, request.gid, umask)
        )
        return self._created(request, data, flags, attr, handle)

    def _created_before(self, before: OpenedFile) -> bytes:
        entry = self._encoder.entry(self.core.attributes.getattr(before.node, before.handle))
        return entry + _opened_reply(before)

    def _tmpfile(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, mode, umask, _ = p.CREATE_IN.unpack_from(data)
        before, _ = self._opened_before(request)
        if before is not None:
            return self._created_before(before)
        attr, handle = self.core.names.tmpfile(
            request.node, mode, flags, Credentials(request.uid, request.gid, umask)
        )
        return self._created(request, data, flags, attr, handle)

    def _created(self, request: FuseRequest, data: memoryview, flags: int, attr: Attr, handle: int) -> bytes:
        try:
            entry = self._made(request, data, attr, written=True)
            with self.modes.lock(attr.node):
                fresh = attr.st.st_size == 0
                preference = self._preference(attr.node, flags, fresh=fresh)
                plan = self.modes.plan(attr.node, flags, fresh=fresh, preference=preference)
                if plan.unseen:
                    self.core.files.is_unseen(handle)
                opened = self._opened(request, attr.node, handle, plan, flags)
        except BaseException:
            # The answer is an error, after which no RELEASE and no FORGET come: an open handle would keep the
            # file's space until the unmount. ``_opened`` may have closed it already.
            with suppress(OSError):
                self.core.files.release(handle)
            self.core.nodes.forget(attr.node, 1)
            raise
        return entry + opened

    def _unopened(self, request: FuseRequest, reply: Reply) -> None:
        """Close a file whose open was interrupted before its answer: no RELEASE will come."""
        assert isinstance(reply, bytes)
        handle, _, _ = p.OPEN_OUT.unpack_from(reply, len(reply) - p.OPEN_OUT.size)
        self._let_go(request.node, handle)

    def _uncreated(self, request: FuseRequest, reply: Reply) -> None:
        """Close a file whose creation was interrupted before its answer: no RELEASE and no FORGET will come."""
        assert isinstance(reply, bytes)
        node, *_ = p.ENTRY_HEAD.unpack_from(reply)
        handle, _, _ = p.OPEN_OUT.unpack_from(reply, len(reply) - p.OPEN_OUT.size)
        self._let_go(node, handle)
        self.core.nodes.forget(node, 1)

    def _let_go(self, node: int, handle: int) -> None:
        if not self.handle_journal.closed(handle):
            # A release that comes again.
            return
        try:
            self.core.files.release(handle)
        finally:
            self.modes.released(node)

    def _release(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, *_ = p.RELEASE_IN.unpack_from(data)
        self._let_go(request.node, handle)
        return b""

    def _read(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, size, *_ = p.READ_IN.unpack_from(data)
        if self._splices and size >= MIN_SPLICED_BYTES:
            # The copy takes most of the time, in which another thread holds the interpreter's lock.
            self.session.hand_on()
            fd = self.core.files.descriptor_to_read(handle, offset, size)
            reply = self.session.piped(request, fd, offset, size)
            return self.core.files.read(handle, offset, size) if reply is None else reply
        # In most cases the data are in memory. A read that waits for a disk gives the turn up first.
        found = self.core.files.read_nowait(handle, offset, size)
        if found is not None:
            return found
        self.session.hand_on()
        return self.core.files.read(handle, offset, size)

    def _write(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, size, flags, *_ = p.WRITE_IN.unpack_from(data)
        # The turn is kept: threads that write one file wait for each other's inode lock (two processors: 954 MB/s
        # instead of 1,122).
        body = self.session.body() if self._splices and size >= MIN_SPLICED_BYTES else None
        payload = data[p.WRITE_IN.size :] if body is None else body
        if len(payload) != size:
            raise p.MalformedRequest(f"{len(payload)} bytes where {size} were announced")
        # Data from the kernel's cache come without their writer; one set-id bit too few is safe.
        kills = bool(flags & (p.WRITE_KILL_SUIDGID | p.WRITE_CACHE))
        written = self.core.files.write(handle, offset, payload, keeps_privileges=not kills)
        return p.WRITE_OUT.pack(written, 0)

    def _flush(self, request: FuseRequest, data: memoryview) -> Reply:
        # struct fuse_flush_in begins with the handle; the rest is for servers that keep locks.
        (handle,) = p.FORGET_IN.unpack_from(data)
        self.core.files.flush(handle)
        return b""

    def _fsync(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, flags, _ = p.FSYNC_IN.unpack_from(data)
        # A sync may take seconds, in which another thread reads.
        self.session.hand_on()
        self.core.files.fsync(handle, bool(flags & p.FSYNC_FDATASYNC))
        return b""

    def _fallocate(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, length, mode, _ = p.FALLOCATE_IN.unpack_from(data)
        self.session.hand_on()
        if mode & _SHIFTS_BLOCKS:
            # Repeated it would shift the blocks twice. It always changes the size, which therefore tells
            # whether it was done.
            unique = request.unique & ~p.UNIQUE_RESEND
            size = os.fstat(self.core.files.descriptor(handle)).st_size
            if request.resent and self.handle_journal.intents.get(unique) not in (None, size):
                return b""
            self.handle_journal.intends(unique, size)
        # Unlike a cached write the request names its caller, whose supplementary groups are known: set-id
        # bits are treated as on a plain file (xfstests generic/683 to 685).
        self.core.files.fallocate(
            *(handle, mode, offset, length),
            keeps_privileges=request.uid == 0,
            is_outside=lambda group: is_outside(group, request.gid, request.pid),
        )
        return b""

    def _lseek(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, whence, _ = p.LSEEK_IN.unpack_from(data)
        if offset >> 63:
            # Beyond the end of any file.
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return p.LSEEK_OUT.pack(self.core.files.lseek(handle, offset, whence))

    def _copied(self, data: memoryview) -> int:
        source, offset, _, target, target_offset, length, flags = p.COPY_FILE_RANGE_IN.unpack_from(data)
        # copy_file_range(2) has no flags yet: EINVAL for any.
        if flags:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.session.hand_on()
        return self.core.files.copy_file_range(source, offset, target, target_offset, length)

    def _copy_file_range(self, request: FuseRequest, data: memoryview) -> Reply:
        return p.WRITE_OUT.pack(self._copied(data), 0)

    def _copy_file_range_64(self, request: FuseRequest, data: memoryview) -> Reply:
        return p.COPY_FILE_RANGE_OUT.pack(self._copied(data))

    # -- directories ----------------------------------------------------------------------------------

    def _opendir(self, request: FuseRequest, data: memoryview) -> Reply:
        unique = request.unique & ~p.UNIQUE_RESEND
        wants_attributes = self._habits.opens(request.pid, request.node)
        if request.resent and (before := self.handle_journal.directory_of(unique)) is not None:
            if self.core.directories.has(before.handle):
                return self._opened_directory(before.handle, wants_attributes)
            # The handle is lost, as in ``_opened_before``.
            self.handle_journal.directory_closed(before.handle)
        handle = self.core.directories.opendir(request.node, uid=request.uid)
        self.handle_journal.directory_opened(OpenedDirectory(handle, request.node, unique, request.uid))
        return self._opened_directory(handle, wants_attributes)

    def _opened_directory(self, handle: int, wants_attributes: bool) -> bytes:
        # What the kernel has kept of a listing is without attributes. It stays for others, who may be in the middle of it.
        own = wants_attributes or not self.core.directories.may_read_copy(handle)
        return p.OPEN_OUT.pack(handle, p.FOPEN_KEEP_CACHE if own else _CACHED_LISTING, 0)

    def _unopened_directory(self, request: FuseRequest, reply: Reply) -> None:
        assert isinstance(reply, bytes)
        handle, _, _ = p.OPEN_OUT.unpack(reply)
        self._close_directory(handle)

    def _close_directory(self, handle: int) -> None:
        self.handle_journal.directory_closed(handle)
        self.core.directories.releasedir(handle)

    def _listed(self, request: FuseRequest, handle: int, pieces: list[bytes]) -> bytes:
        """Return the reply of these pieces; none of them ends the listing."""
        if not pieces and self.core.directories.copied(handle):
            # Unlike pages of a file, those of a directory's copy never wait for a request.
            self.session.invalidate_content(request.node, 0, 0)
        return b"".join(pieces)

    # Offsets 1 and 2 stand for "." and "..", which the core does not list: its own offsets begin behind them.

    def _readdir(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, size, *_ = p.READ_IN.unpack_from(data)
        pieces = [p.pack_dirent(*dot) for dot in self._dots(request.node, offset)]
        room = size - sum(map(len, pieces))
        for name, number, mode, at in self.core.directories.list_names(
            handle, max(offset - 2, 0), _fitting(p.DIRENT.size, room), rewinds=not offset
        ):
            pieces.append(p.pack_dirent(number, mode, at + 2, name))
        return self._listed(request, handle, pieces)

    def _readdirplus(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, size, *_ = p.READ_IN.unpack_from(data)
        # Without a node: the kernel makes no entry for "." and "..", and counts no lookup.
        pieces = [_NO_ENTRY + p.pack_dirent(*dot) for dot in self._dots(request.node, offset)]
        first, room = max(offset - 2, 0), size - sum(map(len, pieces))
        # The kernel forgets only what the reply has room for.
        fitting = _fitting(len(_NO_ENTRY) + p.DIRENT.size, room)
        if self._habits.wants_attributes(request.pid):
            for name, attr, at in self.core.directories.readdir(handle, first, fitting, rewinds=not offset):
                if attr is None:
                    pieces += _NO_ENTRY, p.pack_dirent(UNKNOWN_NUMBER, 0, at + 2, name)
                else:
                    pieces += (
                        self._encoder.entry(attr),
                        p.pack_dirent(attr.node, attr.st.st_mode, at + 2, name),
                    )
        else:
            for name, number, mode, at in self.core.directories.list_names(
                handle, first, fitting, rewinds=not offset
            ):
                pieces += _NO_ENTRY, p.pack_dirent(number, mode, at + 2, name)
        return self._listed(request, handle, pieces)

    def _dots(self, node: int, offset: int) -> Iterator[tuple[int, int, int, bytes]]:
        for at, name in enumerate((b".", b"..")[offset:], offset + 1):
            yield self.core.names.dot(node, name), stat.S_IFDIR, at, name

    def _releasedir(self, request: FuseRequest, data: memoryview) -> Reply:
        (handle, *_) = p.RELEASE_IN.unpack_from(data)
        self._close_directory(handle)
        return b""

    def _fsyncdir(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, flags, _ = p.FSYNC_IN.unpack_from(data)
        self.session.hand_on()
        self.core.directories.fsyncdir(handle, bool(flags & p.FSYNC_FDATASYNC))
        return b""

    # -- the rest -------------------------------------------------------------------------------------

    def _statfs(self, request: FuseRequest, data: memoryview) -> Reply:
        node = ROOT_ID if request.node == SNAPSHOTS_ID else request.node
        return _packed_statfs(self.core.statfs(node))

    def _syncfs(self, request: FuseRequest, data: memoryview) -> Reply:
        self.session.hand_on()
        self.core.syncfs()
        return b""

    def _getxattr(self, request: FuseRequest, data: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(data)
        return p.sized(
            size, self.core.attributes.getxattr(request.node, p.name_of(data[p.GETXATTR_IN.size :]))
        )

    def _listxattr(self, request: FuseRequest, data: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(data)
        names = shown_attributes(self.core.attributes.listxattr(request.node), request.uid, request.pid)
        return p.sized(size, b"".join(name + b"\0" for name in names))

    def _setxattr(self, request: FuseRequest, data: memoryview) -> Reply:
        kills = False
        if self._negotiated.flags & p.SETXATTR_EXT:
            size, flags, more, _ = p.SETXATTR_IN.unpack_from(data)
            kills = bool(more & p.SETXATTR_ACL_KILL_SGID)
            rest = data[p.SETXATTR_IN.size :]
        else:
            size, flags = p.SETXATTR_IN_SHORT.unpack_from(data)
            rest = data[p.SETXATTR_IN_SHORT.size :]
        name = p.name_of(rest)
        value = bytes(rest[len(name) + 1 : len(name) + 1 + size])
        if len(value) != size:
            raise p.MalformedRequest("the value is shorter than announced")
        if flags == XATTR_CREATE:
            flags = self._create_flag(request, name)
        self.core.attributes.setxattr(request.node, name, value, flags, drops_group_bit=kills)
        return b""

    def _create_flag(self, request: FuseRequest, name: bytes) -> int:
        """Return XATTR_CREATE, or 0 where a predecessor found the attribute absent and may have made it."""
        unique = request.unique & ~p.UNIQUE_RESEND
        if request.resent and self.handle_journal.intents.get(unique) == 0:
            return 0
        # An attribute that is there now makes the request fail, also when it comes again. Only an absent one
        # needs a note.
        try:
            self.core.attributes.getxattr(request.node, name)
        except OSError:
            self.handle_journal.intends(unique, 0)
        return XATTR_CREATE

    def _removexattr(self, request: FuseRequest, data: memoryview) -> Reply:
        # The note says that the attribute was there: without it, a successor that finds none cannot tell a
        # removal that was carried out from one that has nothing to remove.
        name, unique = p.name_of(data), request.unique & ~p.UNIQUE_RESEND
        if not request.resent or self.handle_journal.intents.get(unique) is None:
            # Where the attribute is absent, the removal below raises the error.
            with suppress(OSError):
                self.core.attributes.getxattr(request.node, name)
                self.handle_journal.intends(unique, 1)
        try:
            self.core.attributes.removexattr(request.node, name)
        except OSError as error:
            if error.errno != errno.ENODATA or self.handle_journal.intents.get(unique) is None:
                raise
        return b""


def _opened_reply(opened: OpenedFile) -> bytes:
    return p.OPEN_OUT.pack(opened.handle, opened.open_flags, opened.backing_id)


def _nanoseconds(seconds: int, nanoseconds: int) -> int:
    """Return a time in nanoseconds, whose seconds are a signed number sent as an unsigned one."""
    signed = seconds - (1 << 64) if seconds >> 63 else seconds
    return signed * 1_000_000_000 + nanoseconds
