"""The file system operations of one root, each a method that its operation group carries out.

names.py, files.py, attributes.py and directories.py document what each one does. The methods are written out, and not bound by assignment, so that a reader, grep and a type checker
find them. Measured through the kernel driver's handlers, the extra call costs 0.1 to 0.3 µs of the 9 to 15 µs
of a lookup, getattr or write, to which the request's two system calls and the program's own come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ciuic.fuse_layer.core.attributes import Attributes, SetAttr
from ciuic.fuse_layer.core.directories import Directories
from ciuic.fuse_layer.core.files import ContentChanges, Data, KernelTimes
from ciuic.fuse_layer.core.names import Namespace, Removals
from ciuic.fuse_layer.core.passthrough_writers import UnseenWriters
from ciuic.fuse_layer.state.overlay_state import Attr, OverlayState
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.caller import Credentials


class OverlayOperations:
    """OverlayOperations of one root. Nodes and handles are integers, names are bytes, errors are OSError."""

    def __init__(self, state: OverlayState, unseen: UnseenWriters, *, kernel_keeps_times: bool) -> None:
        times = KernelTimes(state, active=kernel_keeps_times)
        self._names = Namespace(state)
        self._removals = Removals(state)
        self._changes = ContentChanges(state, times)
        self._data = Data(state, times, unseen, self._changes)
        self._attributes = Attributes(state, self._changes, times)
        self._directories = Directories(state)

    # -- names --------------------------------------------------------------------------------------

    def lookup(self, parent_id: int, name: bytes) -> Attr:
        """Return the node under a name, and count one lookup of it."""
        return self._names.lookup(parent_id, name)

    def forget(self, node_id: int, count: int) -> None:
        """Take ``count`` lookups back."""
        self._names.forget(node_id, count)

    def readlink(self, node_id: int) -> bytes:
        """Return the target of a symbolic link."""
        return self._names.readlink(node_id)

    def mkdir(self, parent_id: int, name: bytes, mode: int, caller: Credentials) -> Attr:
        """Make a directory."""
        return self._names.mkdir(parent_id, name, mode, caller)

    def mknod(self, parent_id: int, name: bytes, mode: int, rdev: int, caller: Credentials) -> Attr:
        """Make a file, pipe, socket or device."""
        return self._names.mknod(parent_id, name, mode, rdev, caller)

    def symlink(self, parent_id: int, name: bytes, target: bytes, caller: Credentials) -> Attr:
        """Make a symbolic link."""
        return self._names.symlink(parent_id, name, target, caller)

    def create(
        self, parent_id: int, name: bytes, mode: int, flags: int, caller: Credentials
    ) -> tuple[Attr, int]:
        """Create and open a file; return its attributes and the handle."""
        return self._names.create(parent_id, name, mode, flags, caller)

    def tmpfile(self, parent_id: int, mode: int, flags: int, caller: Credentials) -> tuple[Attr, int]:
        """Create and open a file without a name; return its attributes and the handle."""
        return self._names.tmpfile(parent_id, mode, flags, caller)

    def link(self, node_id: int, new_parent_id: int, new_name: bytes) -> Attr:
        """Give a file one more name."""
        return self._names.link(node_id, new_parent_id, new_name)

    def unlink(self, parent_id: int, name: bytes) -> None:
        """Remove the name of anything but a directory."""
        self._removals.unlink(parent_id, name)

    def rmdir(self, parent_id: int, name: bytes) -> None:
        """Remove an empty directory."""
        self._removals.rmdir(parent_id, name)

    def rename(self, parent_id: int, name: bytes, new_parent_id: int, new_name: bytes, flags: int) -> None:
        """Rename; ``flags`` are those of renameat2(2)."""
        self._removals.rename(parent_id, name, new_parent_id, new_name, flags)

    @property
    def before_freeing(self) -> Callable[[], None]:
        """Called before a removal that frees much space; a driver lets other requests go on."""
        return self._removals.before_freeing

    @before_freeing.setter
    def before_freeing(self, call: Callable[[], None]) -> None:
        self._removals.before_freeing = call

    # -- content ------------------------------------------------------------------------------------

    def open(
        self,
        node_id: int,
        flags: int,
        *,
        keeps_privileges: bool = False,
        unseen: bool = False,
        uid: int = 0,
    ) -> int:
        """Open a file and return its handle."""
        return self._data.open(node_id, flags, keeps_privileges=keeps_privileges, unseen=unseen, uid=uid)

    def release(self, handle: int) -> None:
        """Close a handle."""
        self._data.release(handle)

    def flush(self, handle: int) -> None:
        """Carry out one close(2) of possibly several."""
        self._data.flush(handle)

    def fsync(self, handle: int, datasync: bool) -> None:
        """Make the content durable and, without ``datasync``, the attributes."""
        self._data.fsync(handle, datasync)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Read; may wait for the disk."""
        return self._data.read(handle, offset, size)

    def read_nowait(self, handle: int, offset: int, size: int) -> memoryview | None:
        """Read what is in memory; None where that would wait for the disk."""
        return self._data.read_nowait(handle, offset, size)

    def write(
        self, handle: int, offset: int, data: bytes | memoryview, *, keeps_privileges: bool = False
    ) -> int:
        """Write at an offset; return the number of bytes written."""
        return self._changes.write(handle, offset, data, keeps_privileges=keeps_privileges)

    def fallocate(
        self,
        handle: int,
        mode: int,
        offset: int,
        length: int,
        *,
        keeps_privileges: bool = False,
        is_outside: Callable[[int], bool] | None = None,
    ) -> None:
        """Allocate, punch or shift blocks as fallocate(2)."""
        self._changes.fallocate(
            handle, mode, offset, length, keeps_privileges=keeps_privileges, is_outside=is_outside
        )

    def lseek(self, handle: int, offset: int, whence: int) -> int:
        """Find data or a hole (SEEK_DATA, SEEK_HOLE)."""
        return self._data.lseek(handle, offset, whence)

    def copy_file_range(
        self, source: int, source_offset: int, target: int, target_offset: int, length: int
    ) -> int:
        """Copy between two handles; return the number of bytes copied."""
        return self._changes.copy_file_range(source, source_offset, target, target_offset, length)

    def share(self, node_id: int, source_fd: int, source_offset: int, offset: int, length: int) -> None:
        """Give a range of an open file the extents of ``source_fd``."""
        self._changes.share(node_id, source_fd, source_offset, offset, length)

    def is_unseen(self, handle: int) -> None:
        """Note that a file that was just created will be written past the worker."""
        self._data.is_unseen(handle)

    # -- attributes ---------------------------------------------------------------------------------

    def getattr(self, node_id: int, handle: int | None = None) -> Attr:
        """Return a node's attributes."""
        return self._attributes.getattr(node_id, handle)

    def setattr(self, node_id: int, change: SetAttr, handle: int | None = None) -> Attr:
        """Change size, owner, mode or times; return the new attributes."""
        return self._attributes.setattr(node_id, change, handle)

    def statx(self, node_id: int, handle: int | None, mask: int) -> tuple[Attr, syscalls.Statx]:
        """Return a node's attributes with those that only statx(2) tells."""
        return self._attributes.statx(node_id, handle, mask)

    def getxattr(self, node_id: int, name: bytes) -> bytes:
        """Return an extended attribute."""
        return self._attributes.getxattr(node_id, name)

    def listxattr(self, node_id: int) -> list[bytes]:
        """Return the names of extended attributes."""
        return self._attributes.listxattr(node_id)

    def setxattr(
        self, node_id: int, name: bytes, value: bytes, flags: int, *, drops_group_bit: bool = False
    ) -> None:
        """Set an extended attribute."""
        self._attributes.setxattr(node_id, name, value, flags, drops_group_bit=drops_group_bit)

    def removexattr(self, node_id: int, name: bytes) -> None:
        """Remove an extended attribute."""
        self._attributes.removexattr(node_id, name)

    # -- directories --------------------------------------------------------------------------------

    def opendir(self, node_id: int, *, uid: int = 0) -> int:
        """Open a directory and return its handle."""
        return self._directories.opendir(node_id, uid=uid)

    def releasedir(self, handle: int) -> None:
        """Close a handle of a directory."""
        self._directories.releasedir(handle)

    def readdir(self, handle: int, offset: int) -> Iterator[tuple[bytes, Attr, int]]:
        """Yield name, attributes and next offset of the entries from ``offset``."""
        return self._directories.readdir(handle, offset)

    def list_names(self, handle: int, offset: int) -> Iterator[tuple[bytes, int, int, int]]:
        """Yield name, number, mode and next offset of the entries from ``offset``; the kernel remembers none of them."""
        return self._directories.list_names(handle, offset)

    def remember(self, node_id: int) -> None:
        """Count a lookup of an entry that the kernel took from a listing."""
        self._directories.remember(node_id)

    def fsyncdir(self, handle: int, datasync: bool) -> None:
        """Make a directory's names durable."""
        self._directories.fsyncdir(handle, datasync)

    def has_directory(self, handle: int) -> bool:
        """Return whether a handle is an open directory; one that was inherited may not be."""
        return self._directories.has(handle)

    @property
    def on_listing(self) -> Callable[[int, list[bytes]], None]:
        """Called with a handle and the names that offsets of the handle count from now on."""
        return self._directories.on_listing

    @on_listing.setter
    def on_listing(self, call: Callable[[int, list[bytes]], None]) -> None:
        self._directories.on_listing = call
