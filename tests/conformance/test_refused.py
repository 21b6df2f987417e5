"""Operations that ext4 and XFS offer and the mount refuses, exactly as docs/conformance.md says."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

import pytest
from support.overlay import DRIVER, Overlay

pytestmark = pytest.mark.mount

AT_FDCWD = -100
AT_HANDLE_FID = 0x200
"""Flag for a handle that identifies a file and cannot open it, as fanotify reports."""
HANDLE_BYTES = 128
NOT_SUPPORTED = os.strerror(errno.EOPNOTSUPP)
_libc = ctypes.CDLL(None, use_errno=True)


class Handle(ctypes.Structure):
    """C struct file_handle."""

    _fields_ = (
        ("size_bytes", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("data", ctypes.c_ubyte * HANDLE_BYTES),
    )


def handle_of(path: Path, flags: int = 0) -> Handle:
    handle = Handle(HANDLE_BYTES)
    mount_id = ctypes.c_int()
    if _libc.name_to_handle_at(
        AT_FDCWD, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount_id), flags
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return handle


def is_refused() -> bool:
    """Return whether the driver can refuse: the kernel driver from Linux 6.9 on, libfuse 3.14 never."""
    major, minor = (int("".join(filter(str.isdigit, part))) for part in os.uname().release.split(".")[:2])
    return DRIVER == "kernel" and (major, minor) >= (6, 9)


@pytest.mark.skipif(not is_refused(), reason="needs the kernel driver and Linux 6.9")
def test_no_handle_is_given_out_that_could_be_opened(overlay: Overlay) -> None:
    """The call name_to_handle_at answers EOPNOTSUPP for files and directories, cached by the kernel or not.

    Without this, the handle of a removed file opened the file that had been given its inode number.
    """
    (overlay.root / "file").write_bytes(b"x")
    (overlay.root / "directory").mkdir()
    for path in (overlay.root / "file", overlay.root / "directory", overlay.root):
        with pytest.raises(OSError, match=NOT_SUPPORTED):
            handle_of(path)


@pytest.mark.skipif(not is_refused(), reason="needs the kernel driver and Linux 6.9")
def test_handles_that_only_identify_are_given_out(overlay: Overlay) -> None:
    """Handles that only identify are given out, for fanotify and its like, and differ between two files."""
    for name in ("a", "b"):
        (overlay.root / name).touch()
    first, second = (handle_of(overlay.root / name, AT_HANDLE_FID) for name in ("a", "b"))
    assert bytes(first.data) != bytes(second.data)


COLLAPSE_RANGE, INSERT_RANGE, UNSHARE_RANGE = 0x08, 0x20, 0x40


@pytest.mark.parametrize("mode", [COLLAPSE_RANGE, INSERT_RANGE, UNSHARE_RANGE])
def test_ranges_are_not_taken_out_or_put_in(overlay: Overlay, mode: int) -> None:
    """A fallocate that collapses or inserts ranges answers EOPNOTSUPP and leaves the file unchanged."""
    path = overlay.root / f"ranges-{mode}"
    content = os.urandom(4096) * 4
    path.write_bytes(content)
    with open(path, "r+b") as file:
        assert _libc.fallocate(file.fileno(), mode, ctypes.c_long(4096), ctypes.c_long(4096)) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP
    assert path.read_bytes() == content


def test_extents_are_not_reported(overlay: Overlay) -> None:
    """FS_IOC_FIEMAP answers EOPNOTSUPP, FIBMAP reports every block as unmapped, and SEEK_DATA works."""
    path = overlay.root / "extents"
    with open(path, "wb") as file:
        file.write(b"x" * 4096)
        file.truncate(1 << 20)
    with open(path, "rb") as file:
        with pytest.raises(OSError, match=NOT_SUPPORTED):
            fcntl.ioctl(
                file, _FS_IOC_FIEMAP, bytearray(struct.pack("=QQLLLL", 0, 1 << 62, 0, 0, 1, 0) + bytes(56))
            )
        assert fcntl.ioctl(file, _FIBMAP, struct.pack("=i", 0)) == bytes(4)
        if DRIVER == "kernel":
            assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 4096


_FS_IOC_FIEMAP, _FIBMAP = 0xC020660B, 1
"""Request numbers from linux/fs.h."""
