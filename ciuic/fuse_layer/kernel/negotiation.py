"""Negotiation with the kernel before a session: version of the protocol, and features of both sides (FUSE_INIT).

Guarantees: nothing is asked for that the kernel did not offer; a kernel with an older protocol than the
session's oldest (7.31, Linux 5.4) is refused by UnsupportedProtocol, and one with a later major version is
asked for ours.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.system.pipes import MAX_SPLICED_BYTES

MAX_WRITE_BYTES: Final = 1 << 20
# DO_READDIRPLUS without READDIRPLUS_AUTO: core/directories.py chooses the names that come with attributes.
_WANTED = (
    p.ASYNC_READ
    # O_TRUNC comes with the open and not as a SETATTR after it: both are one step inside the gate
    # (core/files.py). Not beside the write cache (`negotiate`).
    | p.ATOMIC_O_TRUNC
    | p.BIG_WRITES
    # The umask comes beside the mode: only the worker knows whether a default ACL overrides it.
    | p.DONT_MASK
    | p.DO_READDIRPLUS
    | p.ASYNC_DIO
    | p.PARALLEL_DIROPS
    | p.POSIX_ACL
    | p.ABORT_ERROR
    | p.MAX_PAGES
    # The target of a link never changes.
    | p.CACHE_SYMLINKS
    # All changes pass through the worker: cached pages stay true although a time or a size has moved.
    | p.EXPLICIT_INVAL_DATA
    # Otherwise the kernel asks for security.capability before every write(2) into its cache (measured with
    # pyfuse3: 4 KiB writes at 87 instead of 259 MB/s).
    | p.HANDLE_KILLPRIV_V2
    | p.SETXATTR_EXT
    | p.INIT_EXT
    | p.SECURITY_CTX
    | p.HAS_RESEND
    # A file handle is a node id, which is an inode number. Once the kernel has forgotten the inode, the
    # number says neither where the file is nor whether it is still the same one: without this flag, the
    # handle of a removed file opened the file that got its number (tests/conformance/test_refused.py). So no
    # handle is given out.
    | p.NO_EXPORT_SUPPORT
)


class UnsupportedProtocol(Exception):
    """The kernel offers no protocol that the session supports."""


class Negotiated(NamedTuple):
    """Terms that were agreed with the kernel; a session that is taken over goes on with the same."""

    minor: int
    flags: int
    max_write_bytes: int = MAX_WRITE_BYTES

    @property
    def passthrough(self) -> bool:
        """True if the kernel may carry data to backing files by itself."""
        return bool(self.flags & p.PASSTHROUGH)

    @property
    def writeback(self) -> bool:
        """True if the kernel's write cache is on."""
        return bool(self.flags & p.WRITEBACK_CACHE)

    @property
    def resends(self) -> bool:
        """True if the kernel sends unanswered requests again, so that a successor can take the session over."""
        return bool(self.flags & p.HAS_RESEND)


def negotiate(fuse_fd: int, *, passthrough: bool, stack_depth: int = 1) -> Negotiated:
    """Answer the kernel's first request, and return what was agreed.

    Args:
        fuse_fd: descriptor of the connection.
        passthrough: use it where it is offered. Without it the kernel's write cache is turned on, which is
            next in speed.
        stack_depth: number of stacked file systems to ask for.

    Raises:
        UnsupportedProtocol: the kernel is older than 5.4.
    """
    while True:
        data = os.read(fuse_fd, p.MIN_READ_BUFFER_BYTES)
        _, opcode, unique, *_ = p.IN_HEADER.unpack_from(data)
        if opcode != p.INIT:
            raise UnsupportedProtocol(f"the kernel's first request must be INIT, got opcode {opcode}")
        major, minor, readahead, offered = p.INIT_IN.unpack_from(data, p.IN_HEADER.size)
        # The upper 32 flags are valid only with INIT_EXT (protocol 7.36).
        if offered & p.INIT_EXT:
            offered |= p.INIT_IN_EXT.unpack_from(data, p.IN_HEADER.size + p.INIT_IN.size)[0] << 32
        if major > p.KERNEL_VERSION:
            # The kernel sends a second INIT in our version.
            _send_init(fuse_fd, unique, readahead, 0, 0)
            continue
        if major < p.KERNEL_VERSION or minor < p.OLDEST_MINOR_VERSION:
            oldest = f"{p.KERNEL_VERSION}.{p.OLDEST_MINOR_VERSION}"
            raise UnsupportedProtocol(f"the kernel must speak FUSE {oldest} or later, got {major}.{minor}")
        break
    flags = _WANTED & offered
    # One or the other: the kernel turns passthrough on only without its write cache (fs/fuse/inode.c).
    if passthrough and offered & p.PASSTHROUGH:
        flags |= p.PASSTHROUGH
    else:
        stack_depth = 0
        flags |= p.WRITEBACK_CACHE & offered
        # After such an open the kernel empties the file once more by itself. With its write cache it keeps
        # that size, although another write was carried out in between.
        flags &= ~p.ATOMIC_O_TRUNC
    # Data that pass through this process do so in a pipe (session.py).
    max_write_bytes = MAX_SPLICED_BYTES if flags & p.WRITEBACK_CACHE else MAX_WRITE_BYTES
    _send_init(fuse_fd, unique, readahead, flags, stack_depth, max_write_bytes)
    return Negotiated(min(minor, p.KERNEL_MINOR_VERSION), flags, max_write_bytes)


def _send_init(
    fuse_fd: int,
    unique: int,
    readahead: int,
    flags: int,
    stack_depth: int,
    max_write_bytes: int = MAX_WRITE_BYTES,
) -> None:
    body = p.INIT_OUT.pack(
        p.KERNEL_VERSION,
        p.KERNEL_MINOR_VERSION,
        # max_readahead: the kernel takes the smaller of this value and its own.
        max(readahead, 1 << 20),
        flags & 0xFFFFFFFF,
        # max_background, congestion_threshold: twelve requests of readahead and writeback in flight, the
        # kernel's default, are too few when an undo log makes some slow.
        64,
        48,
        max_write_bytes,
        # time_gran: times are kept to the nanosecond.
        1,
        # max_pages: a write of the largest size is one request.
        max_write_bytes // os.sysconf("SC_PAGE_SIZE"),
        0,
        flags >> 32,
        stack_depth,
        0,
    )
    os.write(fuse_fd, p.OUT_HEADER.pack(p.OUT_HEADER.size + len(body), 0, unique) + body)
