"""The portable driver: carries FUSE requests from pyfuse3 (libfuse) to the overlay core.

Guarantees: every request is answered, an OSError with its errno and any other exception with EIO and a log
event; no handler ends the server; long work runs in threads (dispatch.py). The core carries operations out,
with every rule of POSIX that the kernel leaves to a file system; docs/conformance.md lists the requests that
libfuse 3.14 cannot carry.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import stat
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import pyfuse3
import structlog
from pyfuse3 import FileHandleT, FileNameT, FlagT, InodeT, ModeT, XAttrNameT

from ciuic.fuse_layer.core.core import Attr, OverlayCore, SetAttr
from ciuic.fuse_layer.core.passthrough_core import DriverHooks
from ciuic.fuse_layer.pyfuse3.dispatch import Dispatch
from ciuic.fuse_layer.system.caller import Credentials, shown_attributes
from ciuic.fuse_layer.tracking.gate import GateHeld

if TYPE_CHECKING:
    from pyfuse3 import EntryAttributes, FileInfo, ReaddirToken, RequestContext, SetattrFields, StatvfsData


log = structlog.get_logger(__name__)

TIMEOUT_SECONDS = 86_400.0
"""Life of cached names and attributes: every change passes through the worker, so they stay true."""
WRITTEN_TIMEOUT_SECONDS = 0.1
"""Life of attributes of files that are open for writing; a getattr ten times a second costs nothing."""
_MIN_BLOCKS = 8
INLINE_WRITE_BYTES = 128 << 10
"""Size above which a write goes to a thread: copying it takes longer than the change of threads."""
_DOTS = (b".", b"..")
_ACCESS_ACL = b"system.posix_acl_access"
LISTING_STEP = 64
"""Directory entries between two pauses, in which other requests run."""
P = ParamSpec("P")
T = TypeVar("T")


def entry_of(attr: Attr, *, written: bool = False) -> pyfuse3.EntryAttributes:
    """Return attributes for the kernel; a node id is its inode number.

    ``written``: it is being opened for writing just now.
    """
    st = attr.st
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = attr.node
    entry.generation = attr.generation
    entry.entry_timeout = TIMEOUT_SECONDS
    entry.attr_timeout = TIMEOUT_SECONDS
    entry.st_mode = st.st_mode
    entry.st_nlink = attr.nlink
    entry.st_uid = st.st_uid
    entry.st_gid = st.st_gid
    entry.st_rdev = st.st_rdev
    entry.st_size = st.st_size
    entry.st_blksize = st.st_blksize
    entry.st_blocks = st.st_blocks
    entry.st_atime_ns = st.st_atime_ns
    entry.st_mtime_ns = st.st_mtime_ns
    entry.st_ctime_ns = st.st_ctime_ns
    if stat.S_ISREG(st.st_mode):
        if attr.written or written:
            _being_written(entry)
        if st.st_mode & (stat.S_ISUID | stat.S_ISGID):
            # A write takes these bits away in the core; the kernel, which would run the file with them, is
            # not told.
            entry.attr_timeout = 0.0
    return entry


def _being_written(entry: pyfuse3.EntryAttributes) -> None:
    """Shorten the life of a written file's attributes, and let it have blocks."""
    # Size and times of a file in the kernel's write cache are the kernel's own; the blocks are the server's,
    # and grow without a request (du). Never none, because archivers take a file without blocks for a single
    # hole and do not read it, while its data may not have been written back yet (GNU tar --sparse).
    entry.attr_timeout = WRITTEN_TIMEOUT_SECONDS
    entry.st_blocks = max(entry.st_blocks, _MIN_BLOCKS)


def absent_entry() -> pyfuse3.EntryAttributes:
    """Return the entry of a name that is free, which the kernel remembers until it creates the name itself."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = 0
    entry.entry_timeout = TIMEOUT_SECONDS
    return entry


def statvfs_of(vfs: os.statvfs_result) -> pyfuse3.StatvfsData:
    """Return file system figures for the kernel."""
    data = pyfuse3.StatvfsData()
    data.f_bsize = vfs.f_bsize
    data.f_frsize = vfs.f_frsize
    data.f_blocks = vfs.f_blocks
    data.f_bfree = vfs.f_bfree
    data.f_bavail = vfs.f_bavail
    data.f_files = vfs.f_files
    data.f_ffree = vfs.f_ffree
    data.f_favail = vfs.f_favail
    data.f_namemax = vfs.f_namemax
    return data


Handler = Callable[Concatenate["Pyfuse3Driver", P], Coroutine[Any, Any, T]]


def _answered(handler: Handler[P, T]) -> Handler[P, T]:
    """Wrap a handler so that its exceptions become errnos of the job's system call."""

    @functools.wraps(handler)
    async def run(self: Pyfuse3Driver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.requests += 1
        try:
            return await handler(self, *args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except OSError as error:
            # The frames refer to the open file, and crossing a thread ties them into a reference cycle: until
            # it was collected, a removed file would take its space, just when the disk is full.
            traceback.clear_frames(error.__traceback__)
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
        except Exception:
            log.exception("request_failed_unexpectedly", operation=handler.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return run


def _caller(ctx: RequestContext) -> Credentials:
    return Credentials(ctx.uid, ctx.gid, ctx.umask)


class Pyfuse3Driver(pyfuse3.Operations):
    """Driver of one mount for ``core``."""

    supports_dot_lookup = False
    enable_writeback_cache = True
    enable_acl = True

    def __init__(self, core: OverlayCore) -> None:
        super().__init__()
        self.core = core
        self.requests = 0
        """Number of requests so far."""
        self.dispatch = Dispatch(core)
        self._directories: dict[int, int] = {}
        """Nodes by handle of an open directory."""

    def init(self) -> None:
        """Register the event loop's thread with the core; called on the loop, before any request."""
        self.core.inline_thread = threading.get_ident()
        self.core.connect(DriverHooks(before_freeing=self._not_on_the_loop))

    # -- names and attributes -----------------------------------------------------------------------

    @_answered
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        try:
            return entry_of(await self.dispatch.read(self.core.names.lookup, parent_inode, name))
        except FileNotFoundError:
            return absent_entry()

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        try:
            for node, count in inode_list:
                self.core.names.forget(node, count)
        except Exception:
            # FORGET has no reply: there is no caller to tell.
            log.exception("forget_failed")

    @_answered
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return entry_of(await self.dispatch.read(self.core.attributes.getattr, inode))

    @_answered
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        change = SetAttr(
            mode=attr.st_mode & 0o7777 if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            keeps_privileges=ctx.uid == 0,
        )
        # A request without any attribute is chown(2) with -1 for both.
        if change == SetAttr(keeps_privileges=ctx.uid == 0):
            change = SetAttr(chown_by=ctx.uid)
        # Freeing the blocks of a large file takes seconds on some file systems.
        run = self.dispatch.long_change if fields.update_size else self.dispatch.change
        return entry_of(await run(self.core.attributes.setattr, inode, change, fh))

    @_answered
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        return await self.dispatch.read(self.core.names.readlink, inode)

    @_answered
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return entry_of(
            await self.dispatch.change(self.core.names.mknod, parent_inode, name, mode, rdev, _caller(ctx))
        )

    @_answered
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        return entry_of(
            await self.dispatch.change(self.core.names.mkdir, parent_inode, name, mode, _caller(ctx))
        )

    @_answered
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        return entry_of(
            await self.dispatch.change(self.core.names.symlink, parent_inode, name, target, _caller(ctx))
        )

    @_answered
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        return entry_of(await self.dispatch.change(self.core.names.link, inode, new_parent_inode, new_name))

    def _not_on_the_loop(self) -> None:
        """Have a removal that takes long run again in a thread, by the exception of an operation that meets a hold."""
        # Nothing has changed yet: the core calls this before the removal.
        if threading.get_ident() == self.core.inline_thread:
            raise GateHeld

    @_answered
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self.dispatch.change(self.core.names.unlink, parent_inode, name)

    @_answered
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self.dispatch.change(self.core.names.rmdir, parent_inode, name)

    @_answered
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        await self.dispatch.change(
            self.core.names.rename, parent_inode_old, name_old, parent_inode_new, name_new, flags
        )

    # -- files ----------------------------------------------------------------------------------------

    @_answered
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        # O_TRUNC is carried out by the core (libfuse asks for FUSE_ATOMIC_O_TRUNC).
        operation = functools.partial(
            self.core.files.open, inode, flags, keeps_privileges=ctx.uid == 0, uid=ctx.uid
        )
        handle = await self.dispatch.change(operation)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            # Attributes that the kernel has cached live long; those of a file that is written live shortly
            # (`entry_of`). The kernel may have dropped the inode meanwhile.
            with contextlib.suppress(FileNotFoundError):
                pyfuse3.invalidate_inode(inode, attr_only=True)
        if self.core.files.appends(handle):
            # The write cache sends whole pages, also what they had before.
            return pyfuse3.FileInfo(fh=handle, direct_io=True)
        # keep_cache: all changes pass through this mount, so pages that are cached stay true.
        return pyfuse3.FileInfo(fh=handle, keep_cache=True)

    @_answered
    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        attr, handle = await self.dispatch.change(
            self.core.names.create, parent_inode, name, mode, flags, _caller(ctx)
        )
        return pyfuse3.FileInfo(fh=handle, keep_cache=True), entry_of(attr, written=True)

    @_answered
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        data = self.core.files.read_nowait(fh, off, size)
        if data is None:
            return await self.dispatch.long_read(self.core.files.read, fh, off, size)
        # Not copied: pyfuse3 takes any contiguous buffer, whatever its annotation says.
        return cast(bytes, data)

    @_answered
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        # Copying more than that takes longer than the change of threads, and stops all other requests.
        run = self.dispatch.long_change if len(buf) > INLINE_WRITE_BYTES else self.dispatch.change
        return await run(self.core.files.write, fh, off, buf)

    @_answered
    async def flush(self, fh: FileHandleT) -> None:
        await self.dispatch.change(self.core.files.flush, fh)

    @_answered
    async def release(self, fh: FileHandleT) -> None:
        await self.dispatch.change(self.core.files.release, fh)

    @_answered
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self.dispatch.sync(self.core.files.fsync, fh, datasync)

    # -- directories ----------------------------------------------------------------------------------

    @_answered
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        handle = await self.dispatch.read(
            functools.partial(self.core.directories.opendir, inode, uid=ctx.uid)
        )
        self._directories[handle] = inode
        return handle

    @_answered
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        entries = await self.dispatch.read(self._entries, fh, start_id)
        while await self.dispatch.read(self._list_some, entries, token):
            await self.dispatch.pause()

    def _entries(self, handle: int, start_id: int) -> Iterator[tuple[bytes, Attr, int]]:
        """The core's entries behind "." and "..", which it leaves out; offsets are its own plus two."""
        node = self._directories[handle]
        for name in _DOTS[start_id:]:
            attr = self.core.names.lookup(node, name)
            # The kernel counts no lookup of the two.
            self.core.names.forget(attr.node, 1)
            start_id += 1
            yield name, attr, start_id
        for name, attr, next_id in self.core.directories.readdir(handle, start_id - len(_DOTS)):
            yield name, attr, next_id + len(_DOTS)

    def _list_some(self, entries: Iterator[tuple[bytes, Attr, int]], token: ReaddirToken) -> bool:
        """Reply up to LISTING_STEP entries; False when the reply is full or the directory at its end."""
        replied = 0
        for name, attr, next_id in itertools.islice(entries, LISTING_STEP):
            if not pyfuse3.readdir_reply(token, name, entry_of(attr), next_id):
                return False
            if name not in _DOTS:
                self.core.directories.remember(attr.node)
            replied += 1
        return replied == LISTING_STEP

    @_answered
    async def releasedir(self, fh: FileHandleT) -> None:
        self._directories.pop(fh, None)
        self.core.directories.releasedir(fh)

    @_answered
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self.dispatch.sync(self.core.directories.fsyncdir, fh, datasync)

    # -- the rest -------------------------------------------------------------------------------------

    @_answered
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        return statvfs_of(await self.dispatch.read(self.core.statfs))

    @_answered
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        return await self.dispatch.read(self.core.attributes.getxattr, inode, name)

    @_answered
    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        operation = functools.partial(
            self.core.attributes.setxattr, drops_group_bit=self._is_outsider_acl(inode, name, ctx)
        )
        # pyfuse3 has already carried out XATTR_CREATE and XATTR_REPLACE by asking for the attribute first.
        await self.dispatch.change(operation, inode, name, value, 0)

    def _is_outsider_acl(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bool:
        """Return whether a request sets the ACL of a set-group-id file of a group that the caller is not in."""
        # The kernel could say so, but libfuse does not ask it to (FUSE_SETXATTR_EXT).
        if name != _ACCESS_ACL or ctx.uid == 0:
            return False
        attr = self.core.attributes.getattr(inode)
        if not attr.st.st_mode & stat.S_ISGID or attr.st.st_gid == ctx.gid:
            return False
        try:
            return attr.st.st_gid not in pyfuse3.get_sup_groups(ctx.pid)
        except (OSError, RuntimeError):
            # The process is gone, or of another process namespace: one bit too few is safe.
            return True

    @_answered
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        names = await self.dispatch.read(self.core.attributes.listxattr, inode)
        return shown_attributes(names, ctx.uid, ctx.pid)

    @_answered
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        await self.dispatch.change(self.core.attributes.removexattr, inode, name)
