"""The directory `.snapshots` at the top of a root: made for a mount of the root's snapshots, and found by nobody else.

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
import os
import stat
import threading
from typing import Final

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.fuse_protocol import FuseRequest
from ciuic.fuse_layer.kernel.session import Reply
from ciuic.fuse_layer.state.node_table import ROOT_ID, SNAPSHOTS_ID

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
_NO_ENTRY: Final = bytes(p.ENTRY_HEAD.size + p.ATTR.size)


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
