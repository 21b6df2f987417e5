"""Random operations through a mount with system calls, over the paths of core_driver."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
from support.core_driver import FOLDERS, NAMES, Operation, path_of

from ciuic.fuse_layer.system import syscalls

_AT_FDCWD = -100


class MountDriver:
    """Driver of operations below one directory; impossible ones (no such name, wrong type) do nothing."""

    def __init__(self, root: Path, block_size: int) -> None:
        self._root = os.fsencode(root)
        self._block_size = block_size
        self._handles: list[int] = []
        self._written = 0
        self._kinds: dict[str, Callable[[bytes, bytes, int], None]] = {
            "create": self._create,
            "write": self._write,
            "append": self._append,
            "map": self._map,
            "truncate": lambda path, _, how: os.truncate(path, how * 3000),
            "punch": self._punch,
            "mkdir": lambda path, _, how: os.mkdir(path, 0o755 if how % 2 else 0o700),
            "symlink": lambda path, other, _: os.symlink(other, path),
            "fifo": lambda path, _, how: os.mkfifo(path),
            "link": lambda path, other, _: os.link(path, other, follow_symlinks=False),
            "unlink": lambda path, _, how: os.unlink(path),
            "rmdir": lambda path, _, how: os.rmdir(path),
            "rename": lambda path, other, _: os.rename(path, other),
            "exchange": lambda path, other, _: syscalls.renameat2(
                _AT_FDCWD, path, _AT_FDCWD, other, syscalls.RENAME_EXCHANGE
            ),
            "chmod": lambda path, _, how: os.chown(path, how, how, follow_symlinks=False),
            "xattr": lambda path, _, how: os.setxattr(
                path, b"trusted.t%d" % (how % 2), b"v" * how, follow_symlinks=False
            ),
            "utime": lambda path, _, how: os.utime(path, ns=(how, 10**18 + how), follow_symlinks=False),
            "open": self._open,
            "write_open": self._write_open,
            "close": self._close,
            "remove_all": lambda path, _, how: self._remove_all(path),
        }

    def do(self, operation: Operation) -> None:
        kind, one, other, how = operation
        with suppress(OSError, NotADirectoryError):
            self._kinds[kind](self._path(path_of(one)), self._path(path_of(other)), how)

    def _path(self, relative: bytes) -> bytes:
        return self._root + b"/" + relative

    def clear(self) -> None:
        """Close everything and remove everything."""
        self.close_all()
        for name in os.listdir(self._root):
            path = self._path(name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def furnish(self) -> None:
        for folder in sorted({folder for folder in FOLDERS if folder}):
            os.mkdir(self._path(folder))
        for number, name in enumerate((b"a", b"\xff\n", b"d/a", b"d/f/a", b"e/a", b"e/f/e")):
            self._create(self._path(name), b"", number)
        os.link(self._path(b"a"), self._path(b"e/e"))

    def close_all(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def _data(self, how: int) -> bytes:
        self._written += 1
        size = (10, self._block_size, self._block_size + 7, 3 * self._block_size)[how % 4]
        return (b"%d " % self._written) * (size // 3 + 1)

    def _create(self, path: bytes, _other: bytes, how: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.pwrite(fd, self._data(how), (how % 3) * self._block_size)
        finally:
            os.close(fd)

    def _file(self, path: bytes, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    def _write(self, path: bytes, _other: bytes, how: int) -> None:
        fd = self._file(path, os.O_WRONLY)
        try:
            os.pwrite(fd, self._data(how), (how * 1000) % (5 * self._block_size))
        finally:
            os.close(fd)

    def _append(self, path: bytes, _other: bytes, how: int) -> None:
        fd = self._file(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, self._data(how))
        finally:
            os.close(fd)

    def _map(self, path: bytes, _other: bytes, how: int) -> None:
        """Write through a shared mapping that outlives its descriptor."""
        fd = self._file(path, os.O_RDWR)
        try:
            size = os.fstat(fd).st_size
            if not size:
                return
            mapped = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        data = self._data(how)[: max(1, size // 2)]
        mapped[: len(data)] = data
        mapped.close()

    def _punch(self, path: bytes, _other: bytes, how: int) -> None:
        fd = self._file(path, os.O_RDWR)
        try:
            syscalls.fallocate(
                fd, syscalls.FALLOC_FL_PUNCH_HOLE | syscalls.FALLOC_FL_KEEP_SIZE, how * 700, self._block_size
            )
        finally:
            os.close(fd)

    def _remove_all(self, path: bytes) -> None:
        # The function rmtree opens any path, and waits at a fifo.
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)

    def _open(self, path: bytes, _other: bytes, how: int) -> None:
        self._handles.append(self._file(path, os.O_RDWR | (os.O_TRUNC if how == 5 else 0)))

    def _write_open(self, _path: bytes, _other: bytes, how: int) -> None:
        if self._handles:
            os.pwrite(self._handles[how % len(self._handles)], self._data(how), how * 999)

    def _close(self, _path: bytes, _other: bytes, how: int) -> None:
        if self._handles:
            os.close(self._handles.pop(how % len(self._handles)))


KINDS = (
    *("create", "create", "create", "write", "write", "append", "map", "truncate", "truncate"),
    *("mkdir", "mkdir", "symlink", "fifo", "link", "unlink", "unlink", "rmdir"),
    *("rename", "rename", "rename", "exchange", "chmod", "xattr", "utime"),
    *("open", "write_open", "close", "remove_all"),
)


def mount_operations(max_size: int) -> st.SearchStrategy[list[Operation]]:
    number = st.integers(0, len(FOLDERS) * len(NAMES) - 1)
    return st.lists(st.tuples(st.sampled_from(KINDS), number, number, st.integers(0, 7)), max_size=max_size)
