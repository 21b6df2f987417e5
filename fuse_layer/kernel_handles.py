"""Requests about what is open: files and directories, from open to release.

Guarantees: a handle that the kernel was told of is in the book (handle_book.py) before, so that a successor can go on with it, and
an open that comes again opens nothing twice; one that nobody waited for is closed; which way data take is decided by ``Modes``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, Final

from ciuic.fuse_layer import kernel_protocol as p
from ciuic.fuse_layer import syscalls
from ciuic.fuse_layer.caller import Caller, is_outside
from ciuic.fuse_layer.core import Attr, OverlayCore
from ciuic.fuse_layer.handle_book import HandleBook
from ciuic.fuse_layer.kernel_answers import Answers
from ciuic.fuse_layer.kernel_modes import Modes, Plan
from ciuic.fuse_layer.kernel_protocol import Request
from ciuic.fuse_layer.kernel_session import Reply, Session
from ciuic.fuse_layer.ledger import Opened, OpenedDirectory
from ciuic.fuse_layer.listing_habits import ListingHabits
from ciuic.fuse_layer.open_rules import Wish

_CACHED_LISTING: Final = p.FOPEN_CACHE_DIR | p.FOPEN_KEEP_CACHE
"""The kernel keeps a listing until it changes the directory itself (its change counter, not a clock, tells)."""
_NO_ENTRY: Final = bytes(p.ENTRY_HEAD.size + p.ATTR.size)
_SHIFTS_BLOCKS: Final = syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE


class HandleRequests:
    """Of one connection. ``made`` finishes a new inode and answers with its entry."""

    session: Session
    """Set by whoever makes it, before it begins."""

    def __init__(
        self,
        core: OverlayCore,
        modes: Modes,
        book: HandleBook,
        answers: Answers,
        *,
        writeback: bool,
        made: Callable[..., bytes],
    ) -> None:
        self.core = core
        self.modes = modes
        self.book = book
        self._answers = answers
        self._writeback = writeback
        self._made = made
        self.habits = ListingHabits()

    def handlers(self) -> Mapping[int, Any]:
        return {
            p.OPEN: self._open,
            p.CREATE: self._create,
            p.TMPFILE: self._tmpfile,
            p.READ: self._read,
            p.WRITE: self._write,
            p.RELEASE: self._release,
            p.FSYNC: self._fsync,
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

    def _open(self, request: Request, data: memoryview) -> Reply:
        flags, open_flags = p.OPEN_IN.unpack_from(data)
        node = request.node
        before, lost = self._opened_before(request)
        if before is not None:
            return p.OPEN_OUT.pack(before.handle, before.open_flags, before.backing_id)
        if lost:
            flags &= ~os.O_TRUNC  # that was done, and others may have written since
        fresh = bool(flags & os.O_TRUNC)
        if fresh and self.core.pending:
            self.session.hand_on()
        with self.modes.lock(node):
            plan = self.modes.plan(node, flags, fresh=fresh, wish=self._wish(node, flags, fresh=fresh))
            handle = self.core.open(
                node,
                flags,
                keeps_privileges=not open_flags & p.OPEN_KILL_SUIDGID,
                unseen=plan.unseen,
                uid=request.uid,
            )
            return self._opened(request, node, handle, plan, flags)

    def _wish(self, node: int, flags: int, *, fresh: bool) -> Wish:
        """Ask the rules about an open whose family is not decided, or that may pass the worker by."""
        if not self.modes.passthrough or (self.modes.is_passthrough(node) and not fresh):
            return Wish.ANY
        return self.core.wish(node, flags, fresh=fresh)

    def _opened_before(self, request: Request) -> tuple[Opened | None, bool]:
        """What a predecessor opened for a request that comes again. Where it was opened, and this process could not open it too
        (True), nobody has been told of that handle: it is given up, and another one is opened."""
        before = self.book.file_of(request.unique & ~p.UNIQUE_RESEND) if request.resent else None
        if before is None or self.core.has_file(before.handle):
            return before, False
        self._let_go(before.node, before.handle)
        return None, True

    def _opened(self, request: Request, node: int, handle: int, plan: Plan, flags: int) -> bytes:
        write_only = flags & os.O_ACCMODE == os.O_WRONLY
        try:
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
        unique = request.unique & ~p.UNIQUE_RESEND
        self.book.opened(Opened(handle, node, unique, flags, final.open_flags, backing_id, request.uid))
        if self._writeback and flags & os.O_ACCMODE != os.O_RDONLY:
            # What the kernel caches of it has a long life; from now on it is asked for again (``_attr``).
            self.session.invalidate_attributes(node)
        return p.OPEN_OUT.pack(handle, final.open_flags, backing_id)

    def _create(self, request: Request, data: memoryview) -> Reply:
        flags, mode, umask, _ = p.CREATE_IN.unpack_from(data)
        name = p.name_of(data[p.CREATE_IN.size :])
        before, _ = self._opened_before(request)
        if before is not None:
            return self._created_before(before)
        if request.resent:
            flags &= ~(os.O_EXCL | os.O_TRUNC)  # as ``_once``; what was made then was empty
        attr, handle = self.core.create(
            request.node, name, mode, flags, Caller(request.uid, request.gid, umask)
        )
        return self._created(request, data, flags, attr, handle)

    def _created_before(self, before: Opened) -> bytes:
        entry = self._answers.entry(self.core.getattr(before.node, before.handle))
        return entry + p.OPEN_OUT.pack(before.handle, before.open_flags, before.backing_id)

    def _tmpfile(self, request: Request, data: memoryview) -> Reply:
        flags, mode, umask, _ = p.CREATE_IN.unpack_from(data)
        before, _ = self._opened_before(request)
        if before is not None:
            return self._created_before(before)
        attr, handle = self.core.tmpfile(request.node, mode, flags, Caller(request.uid, request.gid, umask))
        return self._created(request, data, flags, attr, handle)

    def _created(self, request: Request, data: memoryview, flags: int, attr: Attr, handle: int) -> bytes:
        try:
            entry = self._made(request, data, attr, written=True)
            with self.modes.lock(attr.node):
                fresh = attr.st.st_size == 0
                wish = self._wish(attr.node, flags, fresh=fresh)
                plan = self.modes.plan(attr.node, flags, fresh=fresh, wish=wish)
                if plan.unseen:
                    self.core.is_unseen(handle)
                opened = self._opened(request, attr.node, handle, plan, flags)
        except BaseException:
            self.core.forget(attr.node, 1)
            raise
        return entry + opened

    def unopened(self, request: Request, reply: Reply) -> None:
        """The program that opened was killed meanwhile: no RELEASE will come."""
        assert isinstance(reply, bytes)
        handle, _, _ = p.OPEN_OUT.unpack_from(reply, len(reply) - p.OPEN_OUT.size)
        self._let_go(request.node, handle)

    def uncreated(self, request: Request, reply: Reply) -> None:
        assert isinstance(reply, bytes)
        node, *_ = p.ENTRY_HEAD.unpack_from(reply)
        handle, _, _ = p.OPEN_OUT.unpack_from(reply, len(reply) - p.OPEN_OUT.size)
        self._let_go(node, handle)
        self.core.forget(node, 1)

    def _let_go(self, node: int, handle: int) -> None:
        if not self.book.closed(handle):
            return  # a release that comes again
        try:
            self.core.release(handle)
        finally:
            self.modes.released(node)

    def _release(self, request: Request, data: memoryview) -> Reply:
        handle, *_ = p.RELEASE_IN.unpack_from(data)
        self._let_go(request.node, handle)
        return b""

    def _read(self, request: Request, data: memoryview) -> Reply:
        handle, offset, size, *_ = p.READ_IN.unpack_from(data)
        found = self.core.read_nowait(handle, offset, size)
        if found is not None:
            return found
        self.session.hand_on()
        return self.core.read(handle, offset, size)

    def _write(self, request: Request, data: memoryview) -> Reply:
        handle, offset, size, flags, *_ = p.WRITE_IN.unpack_from(data)
        payload = data[p.WRITE_IN.size :]
        if len(payload) != size:
            raise p.Malformed(f"{len(payload)} bytes where {size} were announced")
        # Through the kernel's cache it is not known who wrote; a set-id bit too few is safe.
        kills = bool(flags & (p.WRITE_KILL_SUIDGID | p.WRITE_CACHE))
        written = self.core.write(handle, offset, payload, keeps_privileges=not kills)
        return p.WRITE_OUT.pack(written, 0)

    def _flush(self, request: Request, data: memoryview) -> Reply:
        (handle,) = p.FORGET_IN.unpack_from(data)
        self.core.flush(handle)
        return b""

    def _fsync(self, request: Request, data: memoryview) -> Reply:
        handle, flags, _ = p.FSYNC_IN.unpack_from(data)
        self.session.hand_on()
        self.core.fsync(handle, bool(flags & p.FSYNC_FDATASYNC))
        return b""

    def _fallocate(self, request: Request, data: memoryview) -> Reply:
        handle, offset, length, mode, _ = p.FALLOCATE_IN.unpack_from(data)
        self.session.hand_on()
        if mode & _SHIFTS_BLOCKS:
            # Repeated it would shift twice; it always changes the size.
            unique = request.unique & ~p.UNIQUE_RESEND
            size = os.fstat(self.core.descriptor(handle)).st_size
            if request.resent and self.book.intent_of(unique) not in (None, size):
                return b""
            self.book.intends(unique, size)
        self.core.fallocate(
            *(handle, mode, offset, length),
            keeps_privileges=request.uid == 0,
            is_outside=lambda group: is_outside(group, request.gid, request.pid),
        )
        return b""

    def _lseek(self, request: Request, data: memoryview) -> Reply:
        handle, offset, whence, _ = p.LSEEK_IN.unpack_from(data)
        if offset >> 63:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))  # beyond the end of any file
        return p.LSEEK_OUT.pack(self.core.lseek(handle, offset, whence))

    def _copied(self, data: memoryview) -> int:
        source, offset, _, target, target_offset, length, flags = p.COPY_FILE_RANGE_IN.unpack_from(data)
        if flags:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.session.hand_on()
        return self.core.copy_file_range(source, offset, target, target_offset, length)

    def _copy_file_range(self, request: Request, data: memoryview) -> Reply:
        return p.WRITE_OUT.pack(self._copied(data), 0)

    def _copy_file_range_64(self, request: Request, data: memoryview) -> Reply:
        return p.COPY_FILE_RANGE_OUT.pack(self._copied(data))

    # -- directories ----------------------------------------------------------------------------------

    def _opendir(self, request: Request, data: memoryview) -> Reply:
        unique = request.unique & ~p.UNIQUE_RESEND
        if request.resent and (before := self.book.directory_of(unique)) is not None:
            if self.core.has_directory(before.handle):
                return p.OPEN_OUT.pack(before.handle, _CACHED_LISTING, 0)
            self.book.directory_closed(before.handle)  # as ``_opened_before``
        handle = self.core.opendir(request.node, uid=request.uid)
        self.book.directory_opened(OpenedDirectory(handle, request.node, unique, request.uid))
        return p.OPEN_OUT.pack(handle, _CACHED_LISTING, 0)

    def _readdir(self, request: Request, data: memoryview) -> Reply:
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
        for index, name in enumerate((b".", b"..")[offset:], offset + 1):
            yield name, self.core.dot(node, name), stat.S_IFDIR, index
        for name, number, mode, next_offset in self.core.list_names(handle, max(offset - 2, 0)):
            yield name, number, mode, next_offset + 2

    def _readdirplus(self, request: Request, data: memoryview) -> Reply:
        handle, offset, size, *_ = p.READ_IN.unpack_from(data)
        pieces, room = bytearray(), size
        for index, name in enumerate((b".", b"..")[offset:], offset + 1):
            # Without a node: the kernel links neither, and counts no lookup.
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
            entry = self._answers.entry(attr) + p.pack_dirent(
                attr.node, attr.st.st_mode, next_offset + 2, name
            )
            if len(entry) > room:
                break
            self.core.remember(attr.node)
            pieces += entry
            room -= len(entry)
        return pieces

    def _releasedir(self, request: Request, data: memoryview) -> Reply:
        (handle, *_) = p.RELEASE_IN.unpack_from(data)
        self.book.directory_closed(handle)
        self.core.releasedir(handle)
        return b""

    def _fsyncdir(self, request: Request, data: memoryview) -> Reply:
        handle, flags, _ = p.FSYNC_IN.unpack_from(data)
        self.session.hand_on()
        self.core.fsyncdir(handle, bool(flags & p.FSYNC_FDATASYNC))
        return b""
