"""The driver of our own session with the kernel: decodes requests and has the overlay core carry them out.

Guarantees: no rule of POSIX is decided here; every request that a kernel up to 7.45 sends to a server that
does not keep locks is either carried out or refused with ENOSYS, which the kernel remembers where that saves
requests. ``ReplyEncoder`` decides what the kernel may cache; requests about open files are in
kernel/handles.py; threads and replies are the session's (kernel/session.py).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import XATTR_CREATE
from typing import Any

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.core import Attr, OverlayCore, SetAttr
from ciuic.fuse_layer.fuse_protocol import FuseRequest
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.journal.journal_writer import HandleJournal, JournalWriter
from ciuic.fuse_layer.kernel.answers import ABSENT, ReplyEncoder, sized, statfs
from ciuic.fuse_layer.kernel.handles import HandleRequests
from ciuic.fuse_layer.kernel.modes import OpenModes
from ciuic.fuse_layer.kernel.negotiation import Negotiated
from ciuic.fuse_layer.kernel.session import KernelSession, Reply
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.caller import Credentials, shown_attributes


class KernelDriver:
    """Driver of the connection ``fuse_fd`` for ``core``."""

    def __init__(
        self,
        core: OverlayCore,
        fuse_fd: int,
        negotiated: Negotiated,
        *,
        journal: JournalWriter | None = None,
        inherited: InheritedSession | None = None,
    ) -> None:
        self.core = core
        self.modes = OpenModes(fuse_fd, passthrough=negotiated.passthrough)
        self.handle_journal = HandleJournal(journal, inherited)
        core.on_listing = self.handle_journal.listed
        if inherited is not None:
            self.modes.inherit(inherited.files.values())
        core.held_by_kernel = self.modes.is_passthrough
        self._negotiated = negotiated
        self._encoder = ReplyEncoder(writeback=negotiated.writeback)
        core.before_freeing = lambda: self.session.hand_on()
        self._handles = HandleRequests(
            *(core, self.modes, self.handle_journal, self._encoder),
            writeback=negotiated.writeback,
            made=self._made,
        )
        self.session = self._handles.session = KernelSession(
            fuse_fd,
            self._handlers(),
            # chattr, fs-verity and project quota change what the overlay could neither track nor restore.
            refused={p.IOCTL: errno.ENOTTY},
            unread={
                p.OPEN: self._handles.unopened,
                p.CREATE: self._handles.uncreated,
                p.TMPFILE: self._handles.uncreated,
            },
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
            p.STATFS: self._statfs,
            p.SETXATTR: self._setxattr,
            p.GETXATTR: self._getxattr,
            p.LISTXATTR: self._listxattr,
            p.REMOVEXATTR: self._removexattr,
            **self._handles.handlers(),
            p.SYNCFS: self._syncfs,
            p.STATX: self._statx,
            p.DESTROY: lambda request, data: b"",
        }

    def share(self, node: int, source_fd: int, source_offset: int, offset: int, length: int) -> None:
        """Share extents as the core does, and then have the kernel drop its cache of the range.

        Not for the session's threads.
        """
        self.core.share(node, source_fd, source_offset, offset, length)
        self.session.invalidate_content(node, offset, length)

    # -- names and attributes -------------------------------------------------------------------------

    def _lookup(self, request: FuseRequest, data: memoryview) -> Reply:
        # A program that looks up what it lists gets attributes with its next listings (listing_habits.py).
        self._handles.habits.looked_up(request.pid, request.node)
        try:
            return self._encoder.entry(self.core.lookup(request.node, bytes(data[:-1])))
        except FileNotFoundError:
            # An entry without a node and not ENOENT, which the kernel would not remember.
            return ABSENT

    def _forget(self, request: FuseRequest, data: memoryview) -> Reply:
        self.core.forget(request.node, *p.FORGET_IN.unpack_from(data))
        return None

    def _batch_forget(self, request: FuseRequest, data: memoryview) -> Reply:
        count, _ = p.BATCH_FORGET_IN.unpack_from(data)
        at = p.BATCH_FORGET_IN.size
        for node, lookups in p.FORGET_ONE.iter_unpack(data[at : at + count * p.FORGET_ONE.size]):
            self.core.forget(node, lookups)
        return None

    def _getattr(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, _, handle = p.GETATTR_IN.unpack_from(data)
        return self._encoder.attributes(
            self.core.getattr(request.node, handle if flags & p.GETATTR_FH else None)
        )

    def _statx(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, _, handle, _sync, mask = p.STATX_IN.unpack_from(data)
        attr, extra = self.core.statx(request.node, handle if flags & p.GETATTR_FH else None, mask)
        return self._encoder.statx(attr, extra)

    def _setattr(self, request: FuseRequest, data: memoryview) -> Reply:
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
        # A request without any attribute is chown(2) with -1 for both.
        if change == SetAttr(keeps_privileges=change.keeps_privileges):
            change = SetAttr(chown_by=request.uid)
        if change.size is not None:
            # Freeing the blocks of a large file takes seconds on some file systems.
            self.session.hand_on()
        return self._encoder.attributes(
            self.core.setattr(request.node, change, handle if valid & p.FATTR_FH else None)
        )

    def _readlink(self, request: FuseRequest, data: memoryview) -> Reply:
        return self.core.readlink(request.node)

    def _labels(self, request: FuseRequest, data: memoryview) -> tuple[tuple[bytes, bytes], ...]:
        """Return the security contexts that a new inode is to be given (SELinux)."""
        if not request.extension_bytes:
            return ()
        return tuple(p.security_contexts(bytes(data[len(data) - request.extension_bytes :])))

    def _made(self, request: FuseRequest, data: memoryview, attr: Attr, *, written: bool = False) -> bytes:
        for name, value in self._labels(request, data):
            self.core.setxattr(attr.node, name, value, 0)
        return self._encoder.entry(attr, written=written)

    def _symlink(self, request: FuseRequest, data: memoryview) -> Reply:
        name, target = p.names_of(data, 2)
        caller = Credentials(request.uid, request.gid, 0)
        return self._once(request, data, name, lambda: self.core.symlink(request.node, name, target, caller))

    def _mknod(self, request: FuseRequest, data: memoryview) -> Reply:
        mode, rdev, umask, _ = p.MKNOD_IN.unpack_from(data)
        name = p.name_of(data[p.MKNOD_IN.size :])
        caller, device = Credentials(request.uid, request.gid, umask), p.user_device(rdev)
        return self._once(
            request, data, name, lambda: self.core.mknod(request.node, name, mode, device, caller)
        )

    def _mkdir(self, request: FuseRequest, data: memoryview) -> Reply:
        mode, umask = p.MKDIR_IN.unpack_from(data)
        name = p.name_of(data[p.MKDIR_IN.size :])
        caller = Credentials(request.uid, request.gid, umask)
        return self._once(request, data, name, lambda: self.core.mkdir(request.node, name, mode, caller))

    def _once(self, request: FuseRequest, data: memoryview, name: bytes, make: Callable[[], Attr]) -> bytes:
        """Make a name, once even if the request comes again, and answer with its entry."""
        # The kernel holds the directory locked while it waits, and knew that the name was free: a name that
        # is there when the request comes again was made by the predecessor.
        try:
            attr = make()
        except FileExistsError:
            if not request.resent:
                raise
            attr = self.core.lookup(request.node, name)
        try:
            return self._made(request, data, attr)
        except BaseException:
            # The answer is an error, with which the kernel counts no lookup.
            self.core.forget(attr.node, 1)
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
        return self._gone(request, lambda: self.core.unlink(request.node, p.name_of(data)))

    def _rmdir(self, request: FuseRequest, data: memoryview) -> Reply:
        return self._gone(request, lambda: self.core.rmdir(request.node, p.name_of(data)))

    def _rename(self, request: FuseRequest, data: memoryview) -> Reply:
        (target,) = p.RENAME_IN.unpack_from(data)
        old, new = p.names_of(data[p.RENAME_IN.size :], 2)
        return self._gone(request, lambda: self.core.rename(request.node, old, target, new, 0))

    def _rename2(self, request: FuseRequest, data: memoryview) -> Reply:
        target, flags, _ = p.RENAME2_IN.unpack_from(data)
        old, new = p.names_of(data[p.RENAME2_IN.size :], 2)
        if flags & syscalls.RENAME_EXCHANGE:
            return self._exchange(request, old, target, new, flags)
        return self._gone(request, lambda: self.core.rename(request.node, old, target, new, flags))

    def _exchange(self, request: FuseRequest, old: bytes, target: int, new: bytes, flags: int) -> bytes:
        """Exchange two names, once even if the request comes again."""
        # Both names are there before and after: the inode of the first before tells whether the exchange was
        # carried out.
        unique = request.unique & ~p.UNIQUE_RESEND
        bound_to = self.core.peek(request.node, old)
        intended = self.handle_journal.intent_of(unique) if request.resent else None
        # Without a note the predecessor died before the exchange. This process notes it for its own
        # successor.
        if intended is None:
            self.handle_journal.intends(unique, bound_to)
        elif intended != bound_to:
            # Carried out. The lookups tell the node table of it.
            for parent, name in ((request.node, old), (target, new)):
                self.core.forget(self.core.lookup(parent, name).node, 1)
            return b""
        self.core.rename(request.node, old, target, new, flags)
        return b""

    def _link(self, request: FuseRequest, data: memoryview) -> Reply:
        (node,) = p.LINK_IN.unpack_from(data)
        name = p.name_of(data[p.LINK_IN.size :])
        return self._once(request, data, name, lambda: self.core.link(node, request.node, name))

    # -- the rest -------------------------------------------------------------------------------------

    def _statfs(self, request: FuseRequest, data: memoryview) -> Reply:
        return statfs(self.core.statfs(request.node))

    def _syncfs(self, request: FuseRequest, data: memoryview) -> Reply:
        self.session.hand_on()
        self.core.syncfs()
        return b""

    def _getxattr(self, request: FuseRequest, data: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(data)
        return sized(size, self.core.getxattr(request.node, p.name_of(data[p.GETXATTR_IN.size :])))

    def _listxattr(self, request: FuseRequest, data: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(data)
        names = shown_attributes(self.core.listxattr(request.node), request.uid, request.pid)
        return sized(size, b"".join(name + b"\0" for name in names))

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
        self.core.setxattr(request.node, name, value, flags, drops_group_bit=kills)
        return b""

    def _create_flag(self, request: FuseRequest, name: bytes) -> int:
        """Return XATTR_CREATE, or 0 where a predecessor found the attribute absent and may have made it."""
        unique = request.unique & ~p.UNIQUE_RESEND
        if request.resent and self.handle_journal.intent_of(unique) == 0:
            return 0
        # An attribute that is there now makes the request fail, also when it comes again. Only an absent one
        # needs a note.
        try:
            self.core.getxattr(request.node, name)
        except OSError:
            self.handle_journal.intends(unique, 0)
        return XATTR_CREATE

    def _removexattr(self, request: FuseRequest, data: memoryview) -> Reply:
        # The note says that the attribute was there: without it, a successor that finds none cannot tell a
        # removal that was carried out from one that has nothing to remove.
        name, unique = p.name_of(data), request.unique & ~p.UNIQUE_RESEND
        if not request.resent or self.handle_journal.intent_of(unique) is None:
            # Where the attribute is absent, the removal below raises the error.
            with suppress(OSError):
                self.core.getxattr(request.node, name)
                self.handle_journal.intends(unique, 1)
        try:
            self.core.removexattr(request.node, name)
        except OSError as error:
            if error.errno != errno.ENODATA or self.handle_journal.intent_of(unique) is None:
                raise
        return b""


def _nanoseconds(seconds: int, nanoseconds: int) -> int:
    """Return a time in nanoseconds, whose seconds are a signed number sent as an unsigned one."""
    signed = seconds - (1 << 64) if seconds >> 63 else seconds
    return signed * 1_000_000_000 + nanoseconds
