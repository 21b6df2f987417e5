"""Requests about open files and directories, from open to release.

Guarantees: a handle is in the journal (`HandleJournal`) before the kernel is told of it, so that a
successor can go on with it; an open that comes again opens nothing twice; one whose caller was killed is
closed. ``OpenModes`` decides how data reach the backing file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.core import Attr, OverlayCore
from ciuic.fuse_layer.core.listing_habits import ListingHabits
from ciuic.fuse_layer.fuse_protocol import FuseRequest
from ciuic.fuse_layer.journal.journal_writer import HandleJournal
from ciuic.fuse_layer.journal.records import OpenedDirectory, OpenedFile
from ciuic.fuse_layer.kernel.answers import ReplyEncoder
from ciuic.fuse_layer.kernel.modes import OpenModes, OpenPlan
from ciuic.fuse_layer.kernel.session import KernelSession, Reply
from ciuic.fuse_layer.state.open_rules import OpenPreference
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.caller import Credentials, is_outside

_CACHED_LISTING: Final = p.FOPEN_CACHE_DIR | p.FOPEN_KEEP_CACHE
"""Flags of an open directory: the kernel keeps a listing until it changes the directory itself (by counter,
not by time)."""
_NO_ENTRY: Final = bytes(p.ENTRY_HEAD.size + p.ATTR.size)
_SHIFTS_BLOCKS: Final = syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE


class HandleRequests:
    """Handlers of one connection. ``made`` finishes a new inode and encodes its entry."""

    session: KernelSession
    """Session of the connection; the driver sets it before the session begins."""

    def __init__(
        self,
        core: OverlayCore,
        modes: OpenModes,
        handle_journal: HandleJournal,
        answers: ReplyEncoder,
        *,
        writeback: bool,
        made: Callable[..., bytes],
    ) -> None:
        self.core = core
        self.modes = modes
        self.handle_journal = handle_journal
        self._encoder = answers
        self._writeback = writeback
        self._made = made
        self.habits = ListingHabits()

    def handlers(self) -> Mapping[int, Any]:
        """Return the handlers by opcode."""
        return {
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
        }

    # -- files ----------------------------------------------------------------------------------------

    def _open(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, open_flags = p.OPEN_IN.unpack_from(data)
        node = request.node
        before, lost = self._opened_before(request)
        if before is not None:
            return p.OPEN_OUT.pack(before.handle, before.open_flags, before.backing_id)
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
            handle = self.core.open(
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
        if before is None or self.core.has_file(before.handle):
            return before, False
        self._let_go(before.node, before.handle)
        return None, True

    def _opened(self, request: FuseRequest, node: int, handle: int, plan: OpenPlan, flags: int) -> bytes:
        write_only = flags & os.O_ACCMODE == os.O_WRONLY
        try:
            if self.core.appends(handle):
                plan = self.modes.appending(plan)
            final, backing_id = self.modes.commit(node, plan, self.core.descriptor(handle))
            if final is not plan:
                self.core.is_seen(handle)
            elif final.unseen and not write_only:
                self.core.note_joined(node)
            if final.passthrough or (write_only and not self._writeback):
                self.core.needs_no_flush(handle)
        except BaseException:
            self.core.release(handle)
            raise
        # In the journal before the answer: from then on the kernel uses the handle, also in a successor's
        # time.
        unique = request.unique & ~p.UNIQUE_RESEND
        self.handle_journal.opened(
            OpenedFile(handle, node, unique, flags, final.open_flags, backing_id, request.uid)
        )
        if self._writeback and flags & os.O_ACCMODE != os.O_RDONLY:
            # Attributes that the kernel has cached live long; those of a file that is written live shortly
            # (answers.py).
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
        attr, handle = self.core.create(
            request.node, name, mode, flags, Credentials(request.uid, request.gid, umask)
        )
        return self._created(request, data, flags, attr, handle)

    def _created_before(self, before: OpenedFile) -> bytes:
        entry = self._encoder.entry(self.core.getattr(before.node, before.handle))
        return entry + p.OPEN_OUT.pack(before.handle, before.open_flags, before.backing_id)

    def _tmpfile(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, mode, umask, _ = p.CREATE_IN.unpack_from(data)
        before, _ = self._opened_before(request)
        if before is not None:
            return self._created_before(before)
        attr, handle = self.core.tmpfile(
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
                    self.core.is_unseen(handle)
                opened = self._opened(request, attr.node, handle, plan, flags)
        except BaseException:
            # The answer is an error, after which no RELEASE and no FORGET come: an open handle would keep the
            # file's space until the unmount. ``_opened`` may have closed it already.
            with suppress(OSError):
                self.core.release(handle)
            self.core.forget(attr.node, 1)
            raise
        return entry + opened

    def unopened(self, request: FuseRequest, reply: Reply) -> None:
        """Close a file whose open was interrupted before its answer: no RELEASE will come."""
        assert isinstance(reply, bytes)
        handle, _, _ = p.OPEN_OUT.unpack_from(reply, len(reply) - p.OPEN_OUT.size)
        self._let_go(request.node, handle)

    def uncreated(self, request: FuseRequest, reply: Reply) -> None:
        """Close a file whose creation was interrupted before its answer: no RELEASE and no FORGET will come."""
        assert isinstance(reply, bytes)
        node, *_ = p.ENTRY_HEAD.unpack_from(reply)
        handle, _, _ = p.OPEN_OUT.unpack_from(reply, len(reply) - p.OPEN_OUT.size)
        self._let_go(node, handle)
        self.core.forget(node, 1)

    def _let_go(self, node: int, handle: int) -> None:
        if not self.handle_journal.closed(handle):
            # A release that comes again.
            return
        try:
            self.core.release(handle)
        finally:
            self.modes.released(node)

    def _release(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, *_ = p.RELEASE_IN.unpack_from(data)
        self._let_go(request.node, handle)
        return b""

    def _read(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, size, *_ = p.READ_IN.unpack_from(data)
        # In most cases the data are in memory. A read that waits for a disk gives the turn up first.
        found = self.core.read_nowait(handle, offset, size)
        if found is not None:
            return found
        self.session.hand_on()
        return self.core.read(handle, offset, size)

    def _write(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, size, flags, *_ = p.WRITE_IN.unpack_from(data)
        payload = data[p.WRITE_IN.size :]
        if len(payload) != size:
            raise p.MalformedRequest(f"{len(payload)} bytes where {size} were announced")
        # Data from the kernel's cache come without their writer; one set-id bit too few is safe.
        kills = bool(flags & (p.WRITE_KILL_SUIDGID | p.WRITE_CACHE))
        written = self.core.write(handle, offset, payload, keeps_privileges=not kills)
        return p.WRITE_OUT.pack(written, 0)

    def _flush(self, request: FuseRequest, data: memoryview) -> Reply:
        # struct fuse_flush_in begins with the handle; the rest is for servers that keep locks.
        (handle,) = p.FORGET_IN.unpack_from(data)
        self.core.flush(handle)
        return b""

    def _fsync(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, flags, _ = p.FSYNC_IN.unpack_from(data)
        # A sync may take seconds, in which another thread reads.
        self.session.hand_on()
        self.core.fsync(handle, bool(flags & p.FSYNC_FDATASYNC))
        return b""

    def _fallocate(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, length, mode, _ = p.FALLOCATE_IN.unpack_from(data)
        self.session.hand_on()
        if mode & _SHIFTS_BLOCKS:
            # Repeated it would shift the blocks twice. It always changes the size, which therefore tells
            # whether it was done.
            unique = request.unique & ~p.UNIQUE_RESEND
            size = os.fstat(self.core.descriptor(handle)).st_size
            if request.resent and self.handle_journal.intent_of(unique) not in (None, size):
                return b""
            self.handle_journal.intends(unique, size)
        # Unlike a cached write the request names its caller, whose supplementary groups are known: set-id
        # bits are treated as on a plain file (xfstests generic/683 to 685).
        self.core.fallocate(
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
        return p.LSEEK_OUT.pack(self.core.lseek(handle, offset, whence))

    def _copied(self, data: memoryview) -> int:
        source, offset, _, target, target_offset, length, flags = p.COPY_FILE_RANGE_IN.unpack_from(data)
        # copy_file_range(2) has no flags yet: EINVAL for any.
        if flags:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.session.hand_on()
        return self.core.copy_file_range(source, offset, target, target_offset, length)

    def _copy_file_range(self, request: FuseRequest, data: memoryview) -> Reply:
        return p.WRITE_OUT.pack(self._copied(data), 0)

    def _copy_file_range_64(self, request: FuseRequest, data: memoryview) -> Reply:
        return p.COPY_FILE_RANGE_OUT.pack(self._copied(data))

    # -- directories ----------------------------------------------------------------------------------

    def _opendir(self, request: FuseRequest, data: memoryview) -> Reply:
        unique = request.unique & ~p.UNIQUE_RESEND
        if request.resent and (before := self.handle_journal.directory_of(unique)) is not None:
            if self.core.has_directory(before.handle):
                return p.OPEN_OUT.pack(before.handle, _CACHED_LISTING, 0)
            # The handle is lost, as in ``_opened_before``.
            self.handle_journal.directory_closed(before.handle)
        handle = self.core.opendir(request.node, uid=request.uid)
        self.handle_journal.directory_opened(OpenedDirectory(handle, request.node, unique, request.uid))
        return p.OPEN_OUT.pack(handle, _CACHED_LISTING, 0)

    def _readdir(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, size, *_ = p.READ_IN.unpack_from(data)
        pieces, room = bytearray(), size
        for name, node, mode, next_offset in self._listing(request.node, handle, offset):
            entry = p.pack_dirent(node, mode, next_offset, name)
            if len(entry) > room:
                break
            pieces += entry
            room -= len(entry)
        return pieces

    def _listing(self, node: int, handle: int, offset: int) -> Any:
        # Offsets 1 and 2 stand for "." and "..", which the core does not list: its own offsets begin behind
        # them.
        for index, name in enumerate((b".", b"..")[offset:], offset + 1):
            yield name, self.core.dot(node, name), stat.S_IFDIR, index
        for name, number, mode, next_offset in self.core.list_names(handle, max(offset - 2, 0)):
            yield name, number, mode, next_offset + 2

    def _readdirplus(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, offset, size, *_ = p.READ_IN.unpack_from(data)
        pieces, room = bytearray(), size
        for index, name in enumerate((b".", b"..")[offset:], offset + 1):
            # Without a node: the kernel makes no entry for "." and "..", and counts no lookup.
            entry = _NO_ENTRY + p.pack_dirent(self.core.dot(request.node, name), stat.S_IFDIR, index, name)
            if len(entry) > room:
                return pieces
            pieces += entry
            room -= len(entry)
        first = max(offset - 2, 0)
        if not self.habits.wants_attributes(request.pid, request.node, from_start=offset == 0):
            for name, number, mode, next_offset in self.core.list_names(handle, first):
                entry = _NO_ENTRY + p.pack_dirent(number, mode, next_offset + 2, name)
                if len(entry) > room:
                    break
                pieces += entry
                room -= len(entry)
            return pieces
        for name, attr, next_offset in self.core.readdir(handle, first):
            entry = self._encoder.entry(attr) + p.pack_dirent(
                attr.node, attr.st.st_mode, next_offset + 2, name
            )
            # Only an entry that the reply has room for counts as a lookup: the kernel forgets no other.
            if len(entry) > room:
                break
            self.core.remember(attr.node)
            pieces += entry
            room -= len(entry)
        return pieces

    def _releasedir(self, request: FuseRequest, data: memoryview) -> Reply:
        (handle, *_) = p.RELEASE_IN.unpack_from(data)
        self.handle_journal.directory_closed(handle)
        self.core.releasedir(handle)
        return b""

    def _fsyncdir(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, flags, _ = p.FSYNC_IN.unpack_from(data)
        self.session.hand_on()
        self.core.fsyncdir(handle, bool(flags & p.FSYNC_FDATASYNC))
        return b""
