"""Side of a comparison: one of two directories in which the same operations are done.

``outcome`` carries out an operation by name and gives its result or errno; ``tree`` is everything below a
directory. The caller that compares them chooses user and process (test_differential.py, actor.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ciuic.fuse_layer.system import syscalls

SLOTS = 3
_FLOCK = struct.Struct("hhqqixxxx")
"""C struct flock on 64-bit machines: type, whence, start, length, pid."""
_OFD_GETLK, _OFD_SETLK = 36, 37
_ACL_ENTRY = struct.Struct("<HHI")
_ACL_VERSION = struct.pack("<I", 2)
_NO_ID = 0xFFFFFFFF


def attributes(st_: os.stat_result) -> tuple[int, ...]:
    size = 0 if stat.S_ISDIR(st_.st_mode) else st_.st_size
    return (st_.st_mode, st_.st_nlink, st_.st_uid, st_.st_gid, size, st_.st_rdev)


class Side:
    """Directory on one side, and the handles open on it."""

    def __init__(self, top: Path) -> None:
        self.top = os.fspath(top)
        self.slots: list[int | None] = [None] * SLOTS
        self._direct: set[int] = set()

    def path(self, name: str) -> str:
        return f"{self.top}/{name}"

    def fd(self, slot: int) -> int:
        fd = self.slots[slot]
        if fd is None:
            raise OSError(errno.EBADF, "slot is empty")
        return fd

    def cached(self, slot: int) -> int:
        """Return the handle, unless it is one with O_DIRECT.

        Odd buffers and offsets there are its file system's own matter (docs/conformance.md).
        """
        if slot in self._direct:
            raise OSError(errno.EINVAL, "opened with O_DIRECT")
        return self.fd(slot)

    def close_all(self) -> None:
        for slot in range(SLOTS):
            with contextlib.suppress(OSError):
                self.do_close(slot)

    def do_mkdir(self, name: str, mode: int) -> None:
        os.mkdir(self.path(name), mode)

    def do_rmdir(self, name: str) -> None:
        os.rmdir(self.path(name))

    def do_unlink(self, name: str) -> None:
        os.unlink(self.path(name))

    def do_rename(self, old: str, new: str, flags: int) -> None:
        syscalls.renameat2(-100, os.fsencode(self.path(old)), -100, os.fsencode(self.path(new)), flags)

    def do_link(self, old: str, new: str) -> None:
        os.link(self.path(old), self.path(new), follow_symlinks=False)

    def do_symlink(self, target: str, name: str) -> None:
        os.symlink(target, self.path(name))

    def do_mknod(self, name: str, kind: int, mode: int) -> None:
        os.mknod(self.path(name), kind | mode, os.makedev(1, 3) if kind == stat.S_IFCHR else 0)

    def do_open(self, name: str, flags: int, mode: int, slot: int) -> None:
        # Without O_NONBLOCK, opening a fifo would wait for a partner.
        fd = os.open(self.path(name), flags | os.O_NONBLOCK, mode)
        with contextlib.suppress(OSError):
            self.do_close(slot)
        self.slots[slot] = fd

    def do_close(self, slot: int) -> None:
        fd = self.fd(slot)
        self.slots[slot] = None
        self._direct.discard(slot)
        os.close(fd)

    def do_write(self, slot: int, data: bytes) -> int:
        return os.write(self.cached(slot), data)

    def do_pwrite(self, slot: int, offset: int, data: bytes) -> int:
        return os.pwrite(self.cached(slot), data, offset)

    def do_read(self, slot: int, size: int) -> bytes:
        return os.read(self.cached(slot), size)

    def do_pread(self, slot: int, size: int, offset: int) -> bytes:
        return os.pread(self.cached(slot), size, offset)

    def do_ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self.fd(slot), size)

    def do_truncate(self, name: str, size: int) -> None:
        os.truncate(self.path(name), size)

    def do_fstat(self, slot: int) -> tuple[int, ...]:
        return attributes(os.fstat(self.fd(slot)))

    def do_fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self.fd(slot), mode)

    def do_fsync(self, slot: int) -> None:
        os.fsync(self.fd(slot))

    def do_map(self, slot: int, offset: int, data: bytes) -> bytes:
        """Write through a shared mapping if the handle allows it; return what the handle then reads."""
        fd = self.cached(slot)
        found = os.fstat(fd)
        if found.st_size < offset + len(data) or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o6000:
            raise OSError(errno.EINVAL, "beyond the end, or with set-id bits (docs/conformance.md)")
        with mmap.mmap(fd, 0, mmap.MAP_SHARED) as mapping:
            mapping[offset : offset + len(data)] = data
        return os.pread(fd, 6000, 0)

    def do_chmod(self, name: str, mode: int) -> None:
        os.chmod(self.path(name), mode)

    def do_chown(self, name: str, uid: int, gid: int) -> None:
        os.lchown(self.path(name), uid, gid)

    def do_utime(self, name: str, atime_ns: int, mtime_ns: int) -> tuple[int, int]:
        os.utime(self.path(name), ns=(atime_ns, mtime_ns), follow_symlinks=False)
        found = os.lstat(self.path(name))
        return (found.st_atime_ns, found.st_mtime_ns)

    def do_setxattr(self, name: str, key: str, value: bytes, flags: int) -> None:
        os.setxattr(self.path(name), key, value, flags, follow_symlinks=False)

    def do_getxattr(self, name: str, key: str) -> bytes:
        return os.getxattr(self.path(name), key, follow_symlinks=False)

    def do_listxattr(self, name: str) -> list[str]:
        return sorted(os.listxattr(self.path(name), follow_symlinks=False))

    def do_removexattr(self, name: str, key: str) -> None:
        os.removexattr(self.path(name), key, follow_symlinks=False)

    def do_lstat(self, name: str) -> tuple[int, ...]:
        return attributes(os.lstat(self.path(name)))

    def do_stat(self, name: str) -> tuple[int, ...]:
        return attributes(os.stat(self.path(name)))

    def do_readlink(self, name: str) -> str:
        return os.readlink(self.path(name))

    def do_listdir(self, name: str) -> list[str]:
        return sorted(os.listdir(self.path(name)))

    def do_whole(self, name: str) -> bytes:
        if not stat.S_ISREG(os.stat(self.path(name)).st_mode):
            raise OSError(errno.EINVAL, "not a file")
        with open(self.path(name), "rb") as file:
            return file.read()

    # -- as a particular user, in a process of its own (actor.py) --

    def do_access(self, name: str, mode: int) -> bool:
        return os.access(self.path(name), mode)

    def do_setacl(
        self, name: str, default: bool, owner: int, user: tuple[int, int], group: int, mask: int, other: int
    ) -> None:
        """Set an ACL with one named user (id, permissions), a mask, and permissions of the others."""
        entries = (
            (1, owner, _NO_ID),
            (2, user[1], user[0]),
            (4, group, _NO_ID),
            (16, mask, _NO_ID),
            (32, other, _NO_ID),
        )
        value = _ACL_VERSION + b"".join(_ACL_ENTRY.pack(*entry) for entry in entries)
        os.setxattr(self.path(name), f"system.posix_acl_{'default' if default else 'access'}", value)

    def do_getacl(self, name: str, default: bool) -> bytes:
        return os.getxattr(self.path(name), f"system.posix_acl_{'default' if default else 'access'}")

    def do_fchown(self, slot: int, uid: int, gid: int) -> None:
        os.fchown(self.fd(slot), uid, gid)

    # -- locks; nothing here waits --

    def do_flock(self, slot: int, operation: int) -> None:
        fcntl.flock(self.fd(slot), operation | fcntl.LOCK_NB)

    def do_lock(self, slot: int, kind: int, start: int, length: int, ofd: bool) -> None:
        request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        fcntl.fcntl(self.fd(slot), _OFD_SETLK if ofd else fcntl.F_SETLK, request)

    def do_lock_waiting(self, slot: int, kind: int, start: int, length: int) -> None:
        fcntl.fcntl(self.fd(slot), fcntl.F_SETLKW, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))

    def do_getlock(self, slot: int, kind: int, start: int, length: int, ofd: bool) -> tuple[int, ...]:
        """Return the conflicting lock: type, whence, start, length, pid; F_UNLCK if there is none."""
        request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        found: tuple[int, ...] = _FLOCK.unpack(
            fcntl.fcntl(self.fd(slot), _OFD_GETLK if ofd else fcntl.F_GETLK, request)
        )
        return found

    # -- holes and direct input and output --

    def do_open_direct(self, name: str, slot: int) -> None:
        self.do_open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o666, slot)
        self._direct.add(slot)

    def do_direct_write(self, slot: int, page: int, count: int, letter: int) -> int:
        """Write whole pages from an aligned buffer through any handle."""
        with mmap.mmap(-1, count * mmap.PAGESIZE) as buffer:
            buffer.write(bytes([letter]) * len(buffer))
            return os.pwritev(self.fd(slot), [buffer], page * mmap.PAGESIZE)

    def do_direct_read(self, slot: int, page: int, count: int) -> bytes:
        with mmap.mmap(-1, count * mmap.PAGESIZE) as buffer:
            return buffer[: os.preadv(self.fd(slot), [buffer], page * mmap.PAGESIZE)]

    def do_vectors(self, slot: int, offset: int, pieces: list[bytes]) -> int:
        return os.pwritev(self.cached(slot), pieces, offset)

    def do_copy_range(self, source: int, target: int, count: int, source_at: int, target_at: int) -> int:
        return os.copy_file_range(self.cached(source), self.cached(target), count, source_at, target_at)

    def do_allocate(self, slot: int, mode: int, offset: int, length: int) -> None:
        syscalls.fallocate(self.fd(slot), mode, offset, length)

    def do_seek_end(self, slot: int) -> int:
        return os.lseek(self.fd(slot), 0, os.SEEK_END)

    def do_statvfs(self) -> tuple[int, ...]:
        """Return the fields that do not change while others work on the same file system."""
        found = os.statvfs(self.top)
        return (found.f_bsize, found.f_frsize, found.f_namemax, found.f_flag & os.ST_RDONLY)


def outcome(side: Side, what: str, args: tuple[Any, ...]) -> tuple[str, Any]:
    """Return ("done", result) or ("refused", name of the errno)."""
    call: Callable[..., Any] = getattr(side, f"do_{what}")
    try:
        return ("done", call(*args))
    except OSError as error:
        return ("refused", errno.errorcode.get(error.errno or 0, error.errno))
    except ValueError as error:
        # Mapping an empty file raises it.
        return ("refused", str(error))


def tree(top: str) -> dict[str, Any]:
    """Return everything below a directory: attributes, targets, contents, and which names are one inode."""
    found: dict[str, Any] = {}
    inodes: dict[int, str] = {}
    for directory, names, files in os.walk(top):
        for name in sorted(names + files):
            path = os.path.join(directory, name)
            shown = os.path.relpath(path, top)
            st_ = os.lstat(path)
            content: bytes | str = b""
            if stat.S_ISREG(st_.st_mode):
                with open(path, "rb") as file:
                    content = file.read()
            elif stat.S_ISLNK(st_.st_mode):
                content = os.readlink(path)
            xattrs = {
                key: os.getxattr(path, key, follow_symlinks=False)
                for key in os.listxattr(path, follow_symlinks=False)
            }
            found[shown] = (attributes(st_), content, xattrs, inodes.setdefault(st_.st_ino, shown))
    return found
