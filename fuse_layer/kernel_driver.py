"""The driver for our own session with the kernel: requests decoded, carried out by the overlay core, answers encoded.

Guarantees: nothing of POSIX is decided here; every request that a kernel up to 7.45 sends to a server that does not keep
locks is either carried out or refused with ENOSYS, which the kernel remembers where that saves requests. What the kernel
may cache, and which way data take, is decided by ``Modes``; threads and replies are the session's (kernel_session.py).
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
from ciuic.fuse_layer.core import Attr, OverlayCore, SetAttr
from ciuic.fuse_layer.handle_book import HandleBook
from ciuic.fuse_layer.kernel_modes import Modes, Plan
from ciuic.fuse_layer.kernel_negotiation import Negotiated
from ciuic.fuse_layer.kernel_protocol import Request
from ciuic.fuse_layer.kernel_session import Reply, Session
from ciuic.fuse_layer.ledger import Inherited, Opened, OpenedDirectory
from ciuic.fuse_layer.ledger_writer import Ledger

FOREVER_SECONDS: Final = 86_400
"""Every change passes through us, so what the kernel caches stays true until the kernel itself changes it."""
_WRITTEN_NS: Final = 100_000_000
"""Life of the attributes of a file that is open for writing: mappings change times and blocks without a request."""
_LEAST_BLOCKS: Final = 8
_ABSENT: Final = p.ENTRY_HEAD.pack(0, 0, FOREVER_SECONDS, 0, 0, 0) + bytes(p.ATTR.size)
_CACHED_LISTING: Final = p.FOPEN_CACHE_DIR | p.FOPEN_KEEP_CACHE
"""The kernel keeps a listing until it changes the directory itself (its change counter, not a clock, tells)."""
_NO_ENTRY: Final = bytes(p.ENTRY_HEAD.size + p.ATTR.size)
_SHIFTS_BLOCKS: Final = syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE
_SET_IDS: Final = stat.S_ISUID | stat.S_ISGID


class KernelDriver:
    """Carries the requests of the connection ``fuse_fd`` to ``core``."""

    def __init__(
        self,
        core: OverlayCore,
        fuse_fd: int,
        negotiated: Negotiated,
        *,
        ledger: Ledger | None = None,
        inherited: Inherited | None = None,
    ) -> None:
        self.core = core
        self.modes = Modes(fuse_fd, passthrough=negotiated.passthrough)
        self.book = HandleBook(ledger, inherited)
        core.on_listing = self.book.listed
        if inherited is not None:
            self.modes.inherit(inherited.files.values())
        core.held_by_kernel = self.modes.is_passthrough
        self._negotiated = negotiated
        self._writeback = negotiated.writeback
        self.session = Session(
            fuse_fd,
            self._handlers(),
            # chattr, fs-verity and project quota change what the overlay could neither track nor restore.
            refused={p.IOCTL: errno.ENOTTY},
            unread={p.OPEN: self._unopened, p.CREATE: self._uncreated, p.TMPFILE: self._uncreated},
        )

    def _handlers(self) -> Mapping[int, Any]:
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
            p.OPEN: self._open,
            p.CREATE: self._create,
            p.TMPFILE: self._tmpfile,
            p.READ: self._read,
            p.WRITE: self._write,
            p.STATFS: self._statfs,
            p.RELEASE: self._release,
            p.FSYNC: self._fsync,
            p.SETXATTR: self._setxattr,
            p.GETXATTR: self._getxattr,
            p.LISTXATTR: self._listxattr,
            p.REMOVEXATTR: self._removexattr,
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

    # -- encoding -------------------------------------------------------------------------------------

    def _attr(self, attr: Attr, *, written: bool = False) -> tuple[int, int, bytes]:
        """For how long the attributes are true (seconds, nanoseconds), and struct fuse_attr."""
        st = attr.st
        seconds, nanoseconds, blocks = FOREVER_SECONDS, 0, st.st_blocks
        if stat.S_ISREG(st.st_mode):
            if attr.written or written:
                seconds, nanoseconds = 0, _WRITTEN_NS
                if self._writeback:
                    # Archivers take a file without blocks for a single hole; its data may only not have been written back.
                    blocks = max(blocks, _LEAST_BLOCKS)
            if st.st_mode & _SET_IDS:
                seconds = nanoseconds = 0  # a write takes these away, and the kernel is not told
        return seconds, nanoseconds, p.pack_attr(attr.node, st, attr.nlink, blocks)

    def _entry(self, attr: Attr, *, written: bool = False) -> bytes:
        seconds, nanoseconds, packed = self._attr(attr, written=written)
        head = p.ENTRY_HEAD.pack(attr.node, attr.generation, FOREVER_SECONDS, seconds, 0, nanoseconds)
        return head + packed

    def _attributes(self, attr: Attr) -> bytes:
        seconds, nanoseconds, packed = self._attr(attr)
        return p.ATTR_HEAD.pack(seconds, nanoseconds, 0) + packed

    # -- names and attributes -------------------------------------------------------------------------

    def _lookup(self, request: Request, data: memoryview) -> Reply:
        try:
            return self._entry(self.core.lookup(request.node, bytes(data[:-1])))
        except FileNotFoundError:
            return _ABSENT

    def _forget(self, request: Request, data: memoryview) -> Reply:
        self.core.forget(request.node, *p.FORGET_IN.unpack_from(data))
        return None

    def _batch_forget(self, request: Request, data: memoryview) -> Reply:
        count, _ = p.BATCH_FORGET_IN.unpack_from(data)
        at = p.BATCH_FORGET_IN.size
        for node, lookups in p.FORGET_ONE.iter_unpack(data[at : at + count * p.FORGET_ONE.size]):
            self.core.forget(node, lookups)
        return None

    def _getattr(self, request: Request, data: memoryview) -> Reply:
        flags, _, handle = p.GETATTR_IN.unpack_from(data)
        return self._attributes(self.core.getattr(request.node, handle if flags & p.GETATTR_FH else None))

    def _statx(self, request: Request, data: memoryview) -> Reply:
        flags, _, handle, _sync, mask = p.STATX_IN.unpack_from(data)
        attr, extra = self.core.statx(request.node, handle if flags & p.GETATTR_FH else None, mask)
        seconds, nanoseconds, _packed = self._attr(attr)
        st = attr.st
        times = [divmod(ns, 10**9) for ns in (st.st_atime_ns, extra.btime_ns, st.st_ctime_ns, st.st_mtime_ns)]
        return p.STATX_OUT_HEAD.pack(seconds, nanoseconds, 0) + p.STATX_STRUCT.pack(
            *(extra.mask, st.st_blksize, extra.attributes, attr.nlink, st.st_uid, st.st_gid, st.st_mode),
            *(attr.node, st.st_size, st.st_blocks, extra.attributes_mask),
            *(number for time in times for number in time),
            *(os.major(st.st_rdev), os.minor(st.st_rdev), os.major(st.st_dev), os.minor(st.st_dev)),
        )

    def _setattr(self, request: Request, data: memoryview) -> Reply:
        fields = p.SETATTR_IN.unpack_from(data)
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _ = fields[:11]
        mode, _, uid, gid, _ = fields[11:]
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
        if change == SetAttr(
            keeps_privileges=change.keeps_privileges
        ):  # chown(2) with -1 for both leaves nothing else
            change = SetAttr(chown_by=request.uid)
        if change.size is not None:
            self.session.hand_on()  # freeing the blocks of a large file takes seconds on some file systems
        return self._attributes(
            self.core.setattr(request.node, change, handle if valid & p.FATTR_FH else None)
        )

    def _readlink(self, request: Request, data: memoryview) -> Reply:
        return self.core.readlink(request.node)

    def _caller(self, request: Request, umask: int = 0) -> Caller:
        return Caller(request.uid, request.gid, umask)

    def _labels(self, request: Request, data: memoryview) -> tuple[tuple[bytes, bytes], ...]:
        """Security contexts that the new inode is to be given (SELinux)."""
        if not request.extension_bytes:
            return ()
        return tuple(p.security_contexts(bytes(data[len(data) - request.extension_bytes :])))

    def _made(self, request: Request, data: memoryview, attr: Attr, *, written: bool = False) -> bytes:
        for name, value in self._labels(request, data):
            self.core.setxattr(attr.node, name, value, 0)
        return self._entry(attr, written=written)

    def _symlink(self, request: Request, data: memoryview) -> Reply:
        name, target = p.names_of(data, 2)
        caller = self._caller(request)
        return self._once(request, data, name, lambda: self.core.symlink(request.node, name, target, caller))

    def _mknod(self, request: Request, data: memoryview) -> Reply:
        mode, rdev, umask, _ = p.MKNOD_IN.unpack_from(data)
        name = p.name_of(data[p.MKNOD_IN.size :])
        caller, device = self._caller(request, umask), p.user_device(rdev)
        return self._once(
            request, data, name, lambda: self.core.mknod(request.node, name, mode, device, caller)
        )

    def _mkdir(self, request: Request, data: memoryview) -> Reply:
        mode, umask = p.MKDIR_IN.unpack_from(data)
        name = p.name_of(data[p.MKDIR_IN.size :])
        caller = self._caller(request, umask)
        return self._once(request, data, name, lambda: self.core.mkdir(request.node, name, mode, caller))

    def _once(self, request: Request, data: memoryview, name: bytes, make: Callable[[], Attr]) -> bytes:
        """The kernel holds the directory while it waits, and knew that the name was free: one that is there when the request
        comes again was made by the predecessor."""
        try:
            attr = make()
        except FileExistsError:
            if not request.resent:
                raise
            attr = self.core.lookup(request.node, name)
        return self._made(request, data, attr)

    def _gone(self, request: Request, remove: Callable[[], None]) -> bytes:
        """As ``_once``: a name that is not there any more was removed by the predecessor."""
        try:
            remove()
        except FileNotFoundError:
            if not request.resent:
                raise
        return b""

    def _unlink(self, request: Request, data: memoryview) -> Reply:
        return self._gone(request, lambda: self.core.unlink(request.node, p.name_of(data)))

    def _rmdir(self, request: Request, data: memoryview) -> Reply:
        return self._gone(request, lambda: self.core.rmdir(request.node, p.name_of(data)))

    def _rename(self, request: Request, data: memoryview) -> Reply:
        (target,) = p.RENAME_IN.unpack_from(data)
        old, new = p.names_of(data[p.RENAME_IN.size :], 2)
        return self._gone(request, lambda: self.core.rename(request.node, old, target, new, 0))

    def _rename2(self, request: Request, data: memoryview) -> Reply:
        target, flags, _ = p.RENAME2_IN.unpack_from(data)
        old, new = p.names_of(data[p.RENAME2_IN.size :], 2)
        if flags & syscalls.RENAME_EXCHANGE:
            return self._exchange(request, old, target, new, flags)
        return self._gone(request, lambda: self.core.rename(request.node, old, target, new, flags))

    def _exchange(self, request: Request, old: bytes, target: int, new: bytes, flags: int) -> bytes:
        """Both names are there before and after: what the first was bound to before tells whether it was carried out."""
        unique = request.unique & ~p.UNIQUE_RESEND
        bound_to = self.core.peek(request.node, old)
        if request.resent:
            intended = self.book.intent_of(unique)
            if intended is not None and intended != bound_to:
                for parent, name in ((request.node, old), (target, new)):
                    self.core.forget(self.core.lookup(parent, name).node, 1)  # the table learns of it
                return b""
        else:
            self.book.intends(unique, bound_to)
        self.core.rename(request.node, old, target, new, flags)
        return b""

    def _link(self, request: Request, data: memoryview) -> Reply:
        (node,) = p.LINK_IN.unpack_from(data)
        name = p.name_of(data[p.LINK_IN.size :])
        return self._once(request, data, name, lambda: self.core.link(node, request.node, name))

    # -- open files -----------------------------------------------------------------------------------

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
            plan = self.modes.plan(node, flags, fresh=fresh)
            handle = self.core.open(
                node, flags, keeps_privileges=not open_flags & p.OPEN_KILL_SUIDGID, unseen=plan.unseen
            )
            return self._opened(request, node, handle, plan, flags)

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
            if final.passthrough or (write_only and not self._writeback):
                self.core.needs_no_flush(handle)
        except BaseException:
            self.core.release(handle)
            raise
        unique = request.unique & ~p.UNIQUE_RESEND
        self.book.opened(Opened(handle, node, unique, flags, final.open_flags, backing_id))
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
        attr, handle = self.core.create(request.node, name, mode, flags, self._caller(request, umask))
        return self._created(request, data, flags, attr, handle)

    def _created_before(self, before: Opened) -> bytes:
        entry = self._entry(self.core.getattr(before.node, before.handle))
        return entry + p.OPEN_OUT.pack(before.handle, before.open_flags, before.backing_id)

    def _tmpfile(self, request: Request, data: memoryview) -> Reply:
        flags, mode, umask, _ = p.CREATE_IN.unpack_from(data)
        before, _ = self._opened_before(request)
        if before is not None:
            return self._created_before(before)
        attr, handle = self.core.tmpfile(request.node, mode, flags, self._caller(request, umask))
        return self._created(request, data, flags, attr, handle)

    def _created(self, request: Request, data: memoryview, flags: int, attr: Attr, handle: int) -> bytes:
        try:
            entry = self._made(request, data, attr, written=True)
            with self.modes.lock(attr.node):
                plan = self.modes.plan(attr.node, flags, fresh=attr.st.st_size == 0)
                if plan.unseen:
                    self.core.is_unseen(handle)
                opened = self._opened(request, attr.node, handle, plan, flags)
        except BaseException:
            self.core.forget(attr.node, 1)
            raise
        return entry + opened

    def _unopened(self, request: Request, reply: Reply) -> None:
        """The program that opened was killed meanwhile: no RELEASE will come."""
        assert isinstance(reply, bytes)
        handle, _, _ = p.OPEN_OUT.unpack_from(reply, len(reply) - p.OPEN_OUT.size)
        self._let_go(request.node, handle)

    def _uncreated(self, request: Request, reply: Reply) -> None:
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

    def share(self, node: int, source_fd: int, source_offset: int, offset: int, length: int) -> None:
        """As the core's, and then the kernel forgets what it cached of the range. Not for the session's threads."""
        self.core.share(node, source_fd, source_offset, offset, length)
        self.session.invalidate_content(node, offset, length)

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
        handle = self.core.opendir(request.node)
        self.book.directory_opened(OpenedDirectory(handle, request.node, unique))
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
        for name, attr, next_offset in self.core.readdir(handle, max(offset - 2, 0)):
            yield name, attr.node, attr.st.st_mode, next_offset + 2

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
        for name, attr, next_offset in self.core.readdir(handle, max(offset - 2, 0)):
            entry = self._entry(attr) + p.pack_dirent(attr.node, attr.st.st_mode, next_offset + 2, name)
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

    # -- the rest -------------------------------------------------------------------------------------

    def _statfs(self, request: Request, data: memoryview) -> Reply:
        vfs = self.core.statfs()
        return p.KSTATFS.pack(
            *(vfs.f_blocks, vfs.f_bfree, vfs.f_bavail, vfs.f_files, vfs.f_ffree),
            *(vfs.f_bsize, vfs.f_namemax, vfs.f_frsize),
        )

    def _syncfs(self, request: Request, data: memoryview) -> Reply:
        self.session.hand_on()
        self.core.syncfs()
        return b""

    def _getxattr(self, request: Request, data: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(data)
        return _sized(size, self.core.getxattr(request.node, p.name_of(data[p.GETXATTR_IN.size :])))

    def _listxattr(self, request: Request, data: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(data)
        return _sized(size, b"".join(name + b"\0" for name in self.core.listxattr(request.node)))

    def _setxattr(self, request: Request, data: memoryview) -> Reply:
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
            raise p.Malformed("the value is shorter than announced")
        if request.resent:
            flags = 0  # whether it was there is the kernel's and the predecessor's to know
        self.core.setxattr(request.node, name, value, flags, drops_group_bit=kills)
        return b""

    def _removexattr(self, request: Request, data: memoryview) -> Reply:
        try:
            self.core.removexattr(request.node, p.name_of(data))
        except OSError as error:
            if error.errno != errno.ENODATA or not request.resent:
                raise
        return b""


def _nanoseconds(seconds: int, nanoseconds: int) -> int:
    """Of a time whose seconds are a signed number sent as an unsigned one."""
    signed = seconds - (1 << 64) if seconds >> 63 else seconds
    return signed * 1_000_000_000 + nanoseconds


def _sized(size: int, value: bytes) -> bytes:
    """The answer of the two-step calls: with size 0 how long the value is."""
    if not size:
        return p.GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return value
