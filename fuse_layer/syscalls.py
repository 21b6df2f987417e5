"""System calls that Python's ``os`` lacks or gives only in part, through ctypes. Each raises OSError with
errno.

x86-64 and arm64 numbers are those of the kernel's syscall tables; libc wrappers are used where every
supported libc has them."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)

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
_CAP_VERSION_3: Final = 0x20080522


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


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
_utimensat.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_TimeSpec * 2), ctypes.c_int)
_fallocate = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def renameat2(old_dir_fd: int, old: bytes, new_dir_fd: int, new: bytes, flags: int) -> None:
    """renameat2(2); EINVAL where the file system lacks the flag."""
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


def _timespec(time_ns: int | None, now: bool) -> _TimeSpec:
    if now:
        return _TimeSpec(0, UTIME_NOW)
    if time_ns is None:
        return _TimeSpec(0, UTIME_OMIT)
    return _TimeSpec(*divmod(time_ns, 10**9))


def utimensat(
    path: bytes,
    atime_ns: int | None,
    mtime_ns: int | None,
    *,
    atime_now: bool = False,
    mtime_now: bool = False,
    follow: bool = False,
) -> None:
    """utimensat(2); None leaves a time as it is, which os.utime cannot say."""
    times = (_TimeSpec * 2)(_timespec(atime_ns, atime_now), _timespec(mtime_ns, mtime_now))
    _check(_utimensat(_AT_FDCWD, path, ctypes.byref(times), 0 if follow else _AT_SYMLINK_NOFOLLOW))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2) with its mode bits."""
    _check(_fallocate(fd, mode, offset, length))


def permitted_capabilities() -> tuple[int, int]:
    """The permitted set of the calling thread, as two 32-bit words."""
    header, data = _CapHeader(_CAP_VERSION_3, 0), (_CapData * 2)()
    _check(_syscall(ctypes.c_long(_NR_CAPGET), ctypes.byref(header), ctypes.byref(data)))
    return data[0].permitted, data[1].permitted


def raise_capabilities(permitted: tuple[int, int]) -> None:
    """Make the whole permitted set of the calling thread effective."""
    header, data = _CapHeader(_CAP_VERSION_3, 0), (_CapData * 2)()
    for word, half in zip(permitted, data, strict=True):
        half.effective = half.permitted = word
    _check(_syscall(ctypes.c_long(_NR_CAPSET), ctypes.byref(header), ctypes.byref(data)))


def set_fs_ids(uid: int, gid: int) -> None:
    """File system user and group of the calling thread alone (setfsuid(2) reports no errors)."""
    _syscall(ctypes.c_long(_NR_SETFSGID), ctypes.c_uint(gid))
    _syscall(ctypes.c_long(_NR_SETFSUID), ctypes.c_uint(uid))
