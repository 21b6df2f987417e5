"""The kernel's FUSE protocol: numbers, flags and structures, without behaviour.

The names are those of the header without their common prefixes. All integers are little-endian, as every
architecture is that this runs on. The kernel refuses a reply of a wrong length, and its caller waits on, so a
test pins every structure's size.

References:
    include/uapi/linux/fuse.h of Linux 6.18 (protocol 7.45)
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Final, NamedTuple

KERNEL_VERSION: Final = 7
KERNEL_MINOR_VERSION: Final = 45
OLDEST_MINOR_VERSION: Final = 31
"""Version of Linux 5.4; older ones lack max_pages and nanosecond time_gran."""
# The kernel refuses a read into less with EINVAL (FUSE_MIN_READ_BUFFER).
MIN_READ_BUFFER_BYTES: Final = 8192
ROOT_ID: Final = 1

# -- requests (enum fuse_opcode) ----------------------------------------------------------------------
LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = 1, 2, 3, 4, 5, 6
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK = 8, 9, 10, 11, 12, 13
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = 14, 15, 16, 17, 18, 20
SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR, FLUSH, INIT = 21, 22, 23, 24, 25, 26
OPENDIR, READDIR, RELEASEDIR, FSYNCDIR = 27, 28, 29, 30
GETLK, SETLK, SETLKW, ACCESS, CREATE, INTERRUPT, BMAP, DESTROY = 31, 32, 33, 34, 35, 36, 37, 38
IOCTL, POLL, NOTIFY_REPLY, BATCH_FORGET, FALLOCATE, READDIRPLUS = 39, 40, 41, 42, 43, 44
RENAME2, LSEEK, COPY_FILE_RANGE, SETUPMAPPING, REMOVEMAPPING = 45, 46, 47, 48, 49
SYNCFS, TMPFILE, STATX, COPY_FILE_RANGE_64 = 50, 51, 52, 53

UNIQUE_RESEND: Final = 1 << 63
"""Bit of ``unique``: the kernel sends this request a second time, and it may have been carried out
already."""

# -- notifications (enum fuse_notify_code), sent with unique 0 and the code in place of the error ------
NOTIFY_INVAL_INODE: Final = 2
NOTIFY_INVAL_ENTRY: Final = 3
NOTIFY_RESEND: Final = 7

# -- flags of INIT ------------------------------------------------------------------------------------
ASYNC_READ: Final = 1 << 0
ATOMIC_O_TRUNC: Final = 1 << 3
BIG_WRITES: Final = 1 << 5
DONT_MASK: Final = 1 << 6
AUTO_INVAL_DATA: Final = 1 << 12
DO_READDIRPLUS: Final = 1 << 13
READDIRPLUS_AUTO: Final = 1 << 14
ASYNC_DIO: Final = 1 << 15
WRITEBACK_CACHE: Final = 1 << 16
PARALLEL_DIROPS: Final = 1 << 18
POSIX_ACL: Final = 1 << 20
ABORT_ERROR: Final = 1 << 21
MAX_PAGES: Final = 1 << 22
CACHE_SYMLINKS: Final = 1 << 23
EXPLICIT_INVAL_DATA: Final = 1 << 25
HANDLE_KILLPRIV_V2: Final = 1 << 28
SETXATTR_EXT: Final = 1 << 29
INIT_EXT: Final = 1 << 30
SECURITY_CTX: Final = 1 << 32
DIRECT_IO_ALLOW_MMAP: Final = 1 << 36
PASSTHROUGH: Final = 1 << 37
NO_EXPORT_SUPPORT: Final = 1 << 38
HAS_RESEND: Final = 1 << 39

# -- flags in requests and replies --------------------------------------------------------------------
FOPEN_DIRECT_IO: Final = 1 << 0
FOPEN_KEEP_CACHE: Final = 1 << 1
FOPEN_CACHE_DIR: Final = 1 << 3
FOPEN_PARALLEL_DIRECT_WRITES: Final = 1 << 6
FOPEN_PASSTHROUGH: Final = 1 << 7
OPEN_KILL_SUIDGID: Final = 1 << 0
WRITE_CACHE: Final = 1 << 0
WRITE_KILL_SUIDGID: Final = 1 << 2
GETATTR_FH: Final = 1 << 0
FSYNC_FDATASYNC: Final = 1 << 0
SETXATTR_ACL_KILL_SGID: Final = 1 << 0
FATTR_MODE, FATTR_UID, FATTR_GID, FATTR_SIZE = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FATTR_ATIME, FATTR_MTIME, FATTR_FH = 1 << 4, 1 << 5, 1 << 6
FATTR_ATIME_NOW, FATTR_MTIME_NOW = 1 << 7, 1 << 8
FATTR_KILL_SUIDGID: Final = 1 << 11

# -- ioctls on the connection's descriptor ------------------------------------------------------------
# _IOW(FUSE_DEV_IOC_MAGIC = 229, 1, struct fuse_backing_map), and _IOW(…, 2, uint32_t).
DEV_IOC_BACKING_OPEN: Final = 0x4010E501
DEV_IOC_BACKING_CLOSE: Final = 0x4004E502

# -- structures ---------------------------------------------------------------------------------------
IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen (8-byte units), padding"""
OUT_HEADER: Final = struct.Struct("<IiQ")
"""len, error, unique"""
INIT_IN: Final = struct.Struct("<IIII")
"""major, minor, max_readahead, flags"""
INIT_IN_EXT: Final = struct.Struct("<I44x")
"""flags2 (since 7.36)"""
INIT_OUT: Final = struct.Struct("<IIIIHHIIHHIIH22x")
"""major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
map_alignment, flags2, max_stack_depth, request_timeout"""
ATTR: Final = struct.Struct("<QQQQQQIIIIIIIIII")
"""ino, size, blocks, atime, mtime, ctime, atimensec, mtimensec, ctimensec, mode, nlink, uid, gid, rdev,
blksize, flags"""
ENTRY_HEAD: Final = struct.Struct("<QQQQII")
"""nodeid, generation, entry_valid, attr_valid, entry_valid_nsec, attr_valid_nsec; ATTR follows"""
ATTR_HEAD: Final = struct.Struct("<QII")
"""attr_valid, attr_valid_nsec, dummy; ATTR follows"""
OPEN_OUT: Final = struct.Struct("<QIi")
"""fh, open_flags, backing_id"""
FORGET_IN: Final = struct.Struct("<Q")
"""nlookup"""
BATCH_FORGET_IN: Final = struct.Struct("<II")
"""count, dummy; FORGET_ONE follow"""
FORGET_ONE: Final = struct.Struct("<QQ")
"""nodeid, nlookup"""
GETATTR_IN: Final = struct.Struct("<IIQ")
"""getattr_flags, dummy, fh"""
SETATTR_IN: Final = struct.Struct("<IIQQQQQQIIIIIIII")
"""valid, padding, fh, size, lock_owner, atime, mtime, ctime, atimensec, mtimensec, ctimensec, mode, unused,
uid, gid, unused"""
MKNOD_IN: Final = struct.Struct("<IIII")
"""mode, rdev, umask, padding; name follows"""
MKDIR_IN: Final = struct.Struct("<II")
"""mode, umask; name follows"""
RENAME_IN: Final = struct.Struct("<Q")
"""newdir; two names follow"""
RENAME2_IN: Final = struct.Struct("<QII")
"""newdir, flags, padding; two names follow"""
LINK_IN: Final = struct.Struct("<Q")
"""oldnodeid; name follows"""
OPEN_IN: Final = struct.Struct("<II")
"""flags, open_flags"""
CREATE_IN: Final = struct.Struct("<IIII")
"""flags, mode, umask, open_flags; name follows"""
RELEASE_IN: Final = struct.Struct("<QIIQ")
"""fh, flags, release_flags, lock_owner"""
READ_IN: Final = struct.Struct("<QQIIQII")
"""fh, offset, size, read_flags, lock_owner, flags, padding"""
WRITE_IN: Final = struct.Struct("<QQIIQII")
"""fh, offset, size, write_flags, lock_owner, flags, padding; the data follow"""
WRITE_OUT: Final = struct.Struct("<II")
"""size, padding"""
KSTATFS: Final = struct.Struct("<QQQQQIII28x")
"""blocks, bfree, bavail, files, ffree, bsize, namelen, frsize"""
FSYNC_IN: Final = struct.Struct("<QII")
"""fh, fsync_flags, padding"""
SETXATTR_IN: Final = struct.Struct("<IIII")
"""size, flags, setxattr_flags, padding (with SETXATTR_EXT); name and value follow"""
SETXATTR_IN_SHORT: Final = struct.Struct("<II")
"""size, flags (without SETXATTR_EXT)"""
GETXATTR_IN: Final = struct.Struct("<II")
"""size, padding; the name follows"""
GETXATTR_OUT: Final = struct.Struct("<II")
"""size, padding"""
FALLOCATE_IN: Final = struct.Struct("<QQQII")
"""fh, offset, length, mode, padding"""
LSEEK_IN: Final = struct.Struct("<QQII")
"""fh, offset, whence, padding"""
LSEEK_OUT: Final = struct.Struct("<Q")
"""offset"""
COPY_FILE_RANGE_IN: Final = struct.Struct("<QQQQQQQ")
"""fh_in, off_in, nodeid_out, fh_out, off_out, len, flags"""
COPY_FILE_RANGE_OUT: Final = struct.Struct("<Q")
"""bytes_copied (COPY_FILE_RANGE_64)"""
STATX_IN: Final = struct.Struct("<IIQII")
"""getattr_flags, reserved, fh, sx_flags, sx_mask"""
STATX_OUT_HEAD: Final = struct.Struct("<QII16x")
"""attr_valid, attr_valid_nsec, flags; STATX_STRUCT follows"""
STATX_STRUCT: Final = struct.Struct("<IIQIIIHxxQQQQqIxxxxqIxxxxqIxxxxqIxxxxIIII112x")
"""mask, blksize, attributes, nlink, uid, gid, mode, ino, size, blocks, attributes_mask, atime, btime, ctime,
mtime (each seconds, nanoseconds), rdev_major, rdev_minor, dev_major, dev_minor"""
DIRENT: Final = struct.Struct("<QQII")
"""ino, off, namelen, type; the name follows, padded to 8 bytes"""
BACKING_MAP: Final = struct.Struct("<iIQ")
"""fd, flags, padding"""
BACKING_ID: Final = struct.Struct("<I")
NOTIFY_INVAL_INODE_OUT: Final = struct.Struct("<Qqq")
"""ino, off, len (off < 0: attributes only)"""
SECCTX_HEADER: Final = struct.Struct("<II")
"""size, nr_secctx"""
SECCTX: Final = struct.Struct("<II")
"""size, padding; a name ending in NUL and the value follow, padded to 8 bytes"""

# Times before 1970 are sent as the unsigned number of the same 64 bits.
_MASKED = (1 << 64) - 1


class MalformedRequest(ValueError):
    """A request that the kernel cannot have sent."""


class FuseRequest(NamedTuple):
    """The fixed part of a request."""

    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    pid: int
    extension_bytes: int

    @property
    def resent(self) -> bool:
        """True if a predecessor may have carried it out already."""
        return bool(self.unique & UNIQUE_RESEND)


def pack_attr(node: int, st: os.stat_result, nlink: int, blocks: int) -> bytes:
    """Encode struct fuse_attr; a node id is its inode number."""
    atime, atime_ns = divmod(st.st_atime_ns, 1_000_000_000)
    mtime, mtime_ns = divmod(st.st_mtime_ns, 1_000_000_000)
    ctime, ctime_ns = divmod(st.st_ctime_ns, 1_000_000_000)
    return ATTR.pack(
        node,
        st.st_size,
        blocks,
        atime & _MASKED,
        mtime & _MASKED,
        ctime & _MASKED,
        atime_ns,
        mtime_ns,
        ctime_ns,
        st.st_mode,
        nlink,
        st.st_uid,
        st.st_gid,
        kernel_device(st.st_rdev),
        st.st_blksize,
        0,
    )


def kernel_device(rdev: int) -> int:
    """Encode glibc's 64-bit device number as new_encode_dev: eight bits of the minor below, the rest above."""
    if not rdev:
        return 0
    major, minor = os.major(rdev), os.minor(rdev)
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def user_device(rdev: int) -> int:
    """Decode the kernel's 32-bit device number (new_decode_dev) to glibc's."""
    return os.makedev((rdev & 0xFFF00) >> 8, (rdev & 0xFF) | ((rdev >> 12) & 0xFFF00))


def names_of(data: memoryview, count: int) -> list[bytes]:
    """Return the ``count`` NUL-terminated names at the start of ``data``."""
    parts = bytes(data).split(b"\0", count)
    if len(parts) <= count or not all(parts[:count]):
        raise MalformedRequest(f"expected {count} names, found {len(parts) - 1}")
    return parts[:count]


def name_of(data: memoryview) -> bytes:
    """Return the NUL-terminated name at the start of ``data``."""
    name, end, _ = bytes(data).partition(b"\0")
    if not end:
        raise MalformedRequest("expected a name that ends with NUL")
    return name


def sized(size: int, value: bytes) -> bytes:
    """Encode the answer of getxattr and listxattr: the value, or with size 0 its length. OSError (ERANGE) if it is longer."""
    if not size:
        return GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return value


_PADDING: Final = tuple(bytes(-length % 8) for length in range(8))


def pack_dirent(node: int, mode: int, offset: int, name: bytes) -> bytes:
    """Encode struct fuse_dirent with its name, padded to 8 bytes."""
    length = len(name)
    return DIRENT.pack(node, offset, length, mode >> 12 & 0xF) + name + _PADDING[length % 8]


def security_contexts(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the (attribute, value) pairs of an extension area: security contexts that new files are to be given."""
    at, found = 0, []
    while at + SECCTX_HEADER.size <= len(data):
        size, kind = SECCTX_HEADER.unpack_from(data, at)
        if size < SECCTX_HEADER.size or at + size > len(data):
            raise MalformedRequest("an extension is longer than the request")
        if kind <= _MAX_SECURITY_CONTEXTS:
            found += _contexts_in(data[at + SECCTX_HEADER.size : at + size], kind)
        at += size + -size % 8
    return found


_MAX_SECURITY_CONTEXTS = 31
"""FUSE_MAX_NR_SECCTX; a greater value is the type of another extension."""


def _contexts_in(data: bytes, count: int) -> list[tuple[bytes, bytes]]:
    at, found = 0, []
    for _ in range(count):
        if at + SECCTX.size > len(data):
            raise MalformedRequest("a security context does not end")
        size, _padding = SECCTX.unpack_from(data, at)
        name, end, rest = data[at + SECCTX.size :].partition(b"\0")
        if not end or size > len(rest):
            raise MalformedRequest("a security context does not end")
        found.append((b"security." + name if b"." not in name else name, rest[:size]))
        length = SECCTX.size + len(name) + 1 + size
        at += length + -length % 8
    return found
