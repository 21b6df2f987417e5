"""What is agreed with the kernel before a session: the version of the protocol, and what each side may do.

Guarantees: nothing is asked for that the kernel did not offer; one that is older than what the session can speak (7.31, Linux
5.4) is refused by NotSpoken, and one that speaks a later major version is asked to speak ours.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from ciuic.fuse_layer import kernel_protocol as p

MAX_WRITE_BYTES: Final = 1 << 20
# DO_READDIRPLUS without READDIRPLUS_AUTO: which names come with attributes is chosen in listing_habits.py.
_WANTED = (
    p.ASYNC_READ
    | p.ATOMIC_O_TRUNC
    | p.BIG_WRITES
    | p.DONT_MASK
    | p.DO_READDIRPLUS
    | p.ASYNC_DIO
    | p.PARALLEL_DIROPS
    | p.POSIX_ACL
    | p.ABORT_ERROR
    | p.MAX_PAGES
    | p.CACHE_SYMLINKS
    | p.EXPLICIT_INVAL_DATA
    | p.HANDLE_KILLPRIV_V2
    | p.SETXATTR_EXT
    | p.INIT_EXT
    | p.SECURITY_CTX
    | p.HAS_RESEND
    # A file handle is a node id, which is an inode number. Once the kernel has forgotten the inode, the number says neither
    # where the file is nor whether it is still the same one: without this flag, the handle of a removed file opened the
    # file that got its number (tests/conformance/test_refused.py). So no handle is given out.
    | p.NO_EXPORT_SUPPORT
)


class NotSpoken(Exception):
    """Kernel and session do not come to terms."""


class Negotiated(NamedTuple):
    """What was agreed with the kernel; a session taken over goes on with the same."""

    minor: int
    flags: int
    max_write_bytes: int = MAX_WRITE_BYTES

    @property
    def passthrough(self) -> bool:
        return bool(self.flags & p.PASSTHROUGH)

    @property
    def writeback(self) -> bool:
        return bool(self.flags & p.WRITEBACK_CACHE)

    @property
    def resends(self) -> bool:
        return bool(self.flags & p.HAS_RESEND)


def negotiate(fuse_fd: int, *, passthrough: bool, stack_depth: int = 1) -> Negotiated:
    """Answers the kernel's first request. ``passthrough``: take it where it is offered; else the kernel's write cache is
    turned on, which is the next best.

    NotSpoken for a kernel before 5.4.
    """
    while True:
        data = os.read(fuse_fd, p.MIN_READ_BUFFER_BYTES)
        _, opcode, unique, *_ = p.IN_HEADER.unpack_from(data)
        if opcode != p.INIT:
            raise NotSpoken(f"the kernel's first request is {opcode}, not INIT")
        major, minor, readahead, offered = p.INIT_IN.unpack_from(data, p.IN_HEADER.size)
        if offered & p.INIT_EXT:
            offered |= p.INIT_IN_EXT.unpack_from(data, p.IN_HEADER.size + p.INIT_IN.size)[0] << 32
        if major > p.KERNEL_VERSION:  # it asks again in ours
            _send_init(fuse_fd, unique, readahead, 0, 0)
            continue
        if major < p.KERNEL_VERSION or minor < p.OLDEST_MINOR_VERSION:
            raise NotSpoken(f"the kernel speaks version {major}.{minor}")
        break
    flags = _WANTED & offered
    if passthrough and offered & p.PASSTHROUGH:
        flags |= p.PASSTHROUGH
    else:
        stack_depth = 0
        flags |= p.WRITEBACK_CACHE & offered
    _send_init(fuse_fd, unique, readahead, flags, stack_depth)
    return Negotiated(min(minor, p.KERNEL_MINOR_VERSION), flags)


def _send_init(fuse_fd: int, unique: int, readahead: int, flags: int, stack_depth: int) -> None:
    body = p.INIT_OUT.pack(
        p.KERNEL_VERSION,
        p.KERNEL_MINOR_VERSION,
        max(readahead, 1 << 20),
        flags & 0xFFFFFFFF,
        64,
        48,
        MAX_WRITE_BYTES,
        1,
        MAX_WRITE_BYTES // os.sysconf("SC_PAGE_SIZE"),
        0,
        flags >> 32,
        stack_depth,
        0,
    )
    os.write(fuse_fd, p.OUT_HEADER.pack(p.OUT_HEADER.size + len(body), 0, unique) + body)
