"""System calls that Python's ``os`` lacks or gives only in part, through ctypes. Each raises OSError with errno.

x86-64 and arm64 numbers are those of the kernel's syscall tables; libc wrappers are used where every
supported libc has them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from typing import Final, NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_stays_dumpable = False

RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2
RENAME_WHITEOUT: Final = 4

UTIME_NOW: Final = (1 << 30) - 1
UTIME_OMIT: Final = (1 << 30) - 2
_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100

FALLOC_FL_KEEP_SIZE: Final = 1
FALLOC_FL_PUNCH_HOLE: Final = 2
FALLOC_FL_COLLAPSE_RANGE: Final = 8
FALLOC_FL_ZERO_RANGE: Final = 16
FALLOC_FL_INSERT_RANGE: Final = 32

_ARM64 = platform.machine() in ("aarch64", "arm64")
_NR_RENAMEAT2: Final = 276 if _ARM64 else 316
_NR_CAPSET: Final = 91 if _ARM64 else 126
_NR_CAPGET: Final = 90 if _ARM64 else 125
_NR_SETFSUID: Final = 151 if _ARM64 else 122
_NR_SETFSGID: Final = 152 if _ARM64 else 123
_NR_STATX: Final = 291 if _ARM64 else 332
# The same on every architecture, as of all calls since Linux 5.1.
_NR_OPEN_TREE: Final = 428
_NR_MOVE_MOUNT: Final = 429
_NR_CACHESTAT: Final = 451
_OPEN_TREE_CLONE: Final = 1
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_MOVE_MOUNT_EMPTY_PATHS: Final = 0x04 | 0x40
# _IOW(0x94, 9, int) and _IOW(0x94, 13, struct file_clone_range) of linux/fs.h.
_FICLONE: Final = 0x40049409
_FICLONERANGE: Final = 0x4020940D
_CLONE_RANGE: Final = struct.Struct("=qQQQ")
"""struct file_clone_range: source descriptor, its offset, length, offset in the target."""
_TIMES: Final = struct.Struct("@llll")
"""Two of struct timespec: seconds and nanoseconds, of access and of modification."""
_SYNC_FILE_RANGE_WRITE: Final = 2
_PR_SET_DUMPABLE: Final = 4
_CAP_VERSION_3: Final = 0x20080522


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_utimensat = _libc.utimensat
_utimensat.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
_futimens = _libc.futimens
_futimens.argtypes = (ctypes.c_int, ctypes.c_char_p)
_sync_file_range = _libc.sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_fallocate = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def renameat2(old_dir_fd: int, old: bytes, new_dir_fd: int, new: bytes, flags: int) -> None:
    """Call renameat2(2); EINVAL where the file system lacks the flag."""
    _check(
        _syscall(
            ctypes.c_long(_NR_RENAMEAT2),
            ctypes.c_int(old_dir_fd),
            ctypes.c_char_p(old),
            ctypes.c_int(new_dir_fd),
            ctypes.c_char_p(new),
            ctypes.c_uint(flags),
        )
    )


def _timespec(time_ns: int | None, now: bool) -> tuple[int, int]:
    if now:
        return 0, UTIME_NOW
    if time_ns is None:
        return 0, UTIME_OMIT
    return divmod(time_ns, 10**9)


def utimensat(
    path: bytes | int,
    atime_ns: int | None,
    mtime_ns: int | None,
    *,
    atime_now: bool = False,
    mtime_now: bool = False,
    follow: bool = False,
) -> None:
    """Call utimensat(2) for a path or an open descriptor; None leaves a time as it is, which os.utime cannot."""
    times = _TIMES.pack(*_timespec(atime_ns, atime_now), *_timespec(mtime_ns, mtime_now))
    if isinstance(path, int):
        _check(_futimens(path, times))
    else:
        _check(_utimensat(_AT_FDCWD, path, times, 0 if follow else _AT_SYMLINK_NOFOLLOW))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2) with its mode bits, which os.posix_fallocate lacks."""
    _check(_fallocate(fd, mode, offset, length))


class Statx(NamedTuple):
    """Attributes of statx(2) that stat(2) lacks."""

    mask: int
    """STATX_… bits of what the file system filled in."""
    attributes: int
    attributes_mask: int
    btime_ns: int


def statx(path: bytes | int, mask: int, *, follow: bool) -> Statx:
    """Call statx(2) for a path or a descriptor.

    References:
        struct statx of include/uapi/linux/stat.h; the offsets below are its fields'.
    """
    buffer = ctypes.create_string_buffer(256)
    at, name, flags = _AT_FDCWD, path, 0 if follow else _AT_SYMLINK_NOFOLLOW
    if isinstance(path, int):
        at, name, flags = path, b"", _AT_EMPTY_PATH
    _check(
        _syscall(
            ctypes.c_long(_NR_STATX),
            ctypes.c_int(at),
            ctypes.c_char_p(name),
            ctypes.c_int(flags),
            ctypes.c_uint(mask),
            buffer,
        )
    )
    found, _, attributes = struct.unpack_from("<IIQ", buffer)
    (attributes_mask,) = struct.unpack_from("<Q", buffer, 56)
    seconds, nanoseconds = struct.unpack_from("<qI", buffer, 80)
    return Statx(found, attributes, attributes_mask, seconds * 10**9 + nanoseconds)


def clone_file(target_fd: int, source_fd: int) -> None:
    """Share all extents of one file with another (ioctl FICLONE); EOPNOTSUPP, EXDEV, EINVAL or ENOTTY where it cannot be."""
    fcntl.ioctl(target_fd, _FICLONE, source_fd)


def clone_range(source_fd: int, source_offset: int, length: int, target_fd: int, offset: int) -> None:
    """Share a range's extents with another file (ioctl FICLONERANGE).

    Raises:
        OSError: as of ``clone_file``, and EBADF where the source is not open for reading.
    """
    fcntl.ioctl(target_fd, _FICLONERANGE, _CLONE_RANGE.pack(source_fd, source_offset, length, offset))


def start_writeback(fd: int) -> None:
    """Start writeback of the file's dirty pages, and do not wait for it (sync_file_range(2))."""
    _check(_sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE))


def syncfs(fd: int) -> None:
    """Make the file system of ``fd`` durable (syncfs(2))."""
    _check(_libc.syncfs(ctypes.c_int(fd)))


def file_system_type(fd: int) -> int:
    """Return ``f_type`` of the file system that the descriptor is on (fstatfs(2)), which ``os.statvfs`` leaves out."""
    # struct statfs is 120 bytes; the type is its first word.
    buffer = ctypes.create_string_buffer(256)
    _check(_libc.fstatfs(ctypes.c_int(fd), buffer))
    return int.from_bytes(buffer.raw[:4], "little")


def dirty_pages(fd: int) -> int | None:
    """Return the pages of the file that a clone would write first; None where the kernel does not tell (before 6.5)."""
    # struct cachestat: nr_cache, nr_dirty, nr_writeback, nr_evicted, nr_recently_evicted.
    extent, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if _syscall(ctypes.c_long(_NR_CACHESTAT), ctypes.c_uint(fd), extent, found, ctypes.c_uint(0)) < 0:
        return None
    return int(found[1]) + int(found[2])


def permitted_capabilities() -> tuple[int, int]:
    """Return the permitted capability set of the calling thread, as two 32-bit words."""
    header, data = _CapHeader(_CAP_VERSION_3, 0), (_CapData * 2)()
    _check(_syscall(ctypes.c_long(_NR_CAPGET), ctypes.byref(header), ctypes.byref(data)))
    return data[0].permitted, data[1].permitted


def raise_capabilities(permitted: tuple[int, int]) -> None:
    """Make the whole permitted capability set of the calling thread effective."""
    # setfsuid(2) to another user than root has cleared the file system capabilities of the effective set.
    header, data = _CapHeader(_CAP_VERSION_3, 0), (_CapData * 2)()
    for word, half in zip(permitted, data, strict=True):
        half.effective = half.permitted = word
    _check(_syscall(ctypes.c_long(_NR_CAPSET), ctypes.byref(header), ctypes.byref(data)))


def set_fs_ids(uid: int, gid: int) -> None:
    """Set the file system user and group of the calling thread alone (setfsuid(2) reports no errors)."""
    _syscall(ctypes.c_long(_NR_SETFSGID), ctypes.c_uint(gid))
    _syscall(ctypes.c_long(_NR_SETFSUID), ctypes.c_uint(uid))
    # Otherwise /proc/<pid>/fd stays closed after the first request of an ordinary user: every snapshot during
    # which a directory was renamed was given up in a container without CAP_SYS_PTRACE.
    if _stays_dumpable:
        _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def stay_dumpable() -> None:
    """Have `set_fs_ids` keep the process dumpable, which the kernel clears when a thread's ids change.

    /proc/<pid>/fd of an undumpable process is closed to captures that lack CAP_SYS_PTRACE.
    """
    global _stays_dumpable
    _stays_dumpable = True


def clone_mount(fd: int) -> int:
    """Return a descriptor of a copy of the mount whose root ``fd`` is, with what is mounted inside it; it is mounted nowhere yet."""
    flags = _OPEN_TREE_CLONE | _AT_EMPTY_PATH | _AT_RECURSIVE | os.O_CLOEXEC
    copy = int(_libc.syscall(_NR_OPEN_TREE, fd, b"", flags))
    if copy < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return copy


def attach_mount(mount_fd: int, directory_fd: int) -> None:
    """Mount what `clone_mount` returned over the directory or file ``directory_fd``."""
    if _libc.syscall(_NR_MOVE_MOUNT, mount_fd, b"", directory_fd, b"", _MOVE_MOUNT_EMPTY_PATHS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
