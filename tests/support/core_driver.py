"""Random operations on an overlay core with no mount: few paths, so that operations collide."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st

from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Attr, Credentials, OverlayCore, SetAttr
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.syscalls import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE

ROOT = Credentials(0, 0)
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
FOLDERS = (b"", b"", b"d", b"e", b"d/f", b"e/f")
NAMES = (b"a", b"\xff\n", b"d", b"e", b"f")

Operation = tuple[str, int, int, int]
"""Operation: its name, two numbers that choose paths, one that chooses the variant."""


def path_of(number: int) -> bytes:
    folder = FOLDERS[number // len(NAMES) % len(FOLDERS)]
    name = NAMES[number % len(NAMES)]
    return folder + b"/" + name if folder else name


PATHS = len(FOLDERS) * len(NAMES)


class CoreDriver:
    """Driver of operations on one core; impossible ones (no such name, wrong type) do nothing."""

    def __init__(self, core: OverlayCore, block_size: int) -> None:
        self.core = core
        self.block_size = block_size
        self._handles: list[int] = []
        self._written = 0
        self._lookups: dict[int, int] = {}
        self._kinds: dict[str, Callable[[bytes, bytes, int], None]] = {
            "write": self._write,
            "create": self._create,
            "truncate": self._truncate,
            "punch": self._punch,
            "share": self._share,
            "mkdir": self._mkdir,
            "symlink": self._symlink,
            "fifo": self._fifo,
            "link": self._link,
            "unlink": self._unlink,
            "rmdir": self._rmdir,
            "rename": self._rename,
            "exchange": self._exchange,
            "chmod": self._chmod,
            "xattr": self._xattr,
            "utime": self._utime,
            "open": self._open,
            "write_open": self._write_open,
            "close": self._close,
            "remove_all": self._remove_all,
            "forget": self._forget,
        }

    def do(self, operation: Operation) -> None:
        kind, one, other, how = operation
        with suppress(OSError):
            self._kinds[kind](path_of(one), path_of(other), how)

    def furnish(self) -> None:
        """Make one of every kind of file, so that operations find operands."""
        for path in (b"d", b"e", b"d/f", b"e/f"):
            self._mkdir(path, b"", 1)
        for number, path in enumerate(
            (b"a", b"\xff\n", b"d/a", b"d/f/a", b"d/f/e", b"e/a", b"e/f/a", b"e/d")
        ):
            self._create(path, b"", number)
        self._link(b"a", b"e/e", 0)
        self._link(b"d/f/a", b"d/e", 0)
        self._symlink(b"d/d", b"a", 0)

    def close_all(self) -> None:
        while self._handles:
            self.core.files.release(self._handles.pop())

    def open_for_writing(self) -> set[int]:
        """Return inode numbers of files that a handle can write to now."""
        return {os.fstat(self.core._state.file(handle).fd).st_ino for handle in self._handles}

    def node(self, path: bytes) -> int:
        node = ROOT_ID
        for name in path.split(b"/") if path else ():
            node = self._seen(self.core.names.lookup(node, name))
        return node

    def _seen(self, attr: Attr) -> int:
        """Count a lookup of the node, as the kernel does, to forget all at once later."""
        self._lookups[attr.node] = self._lookups.get(attr.node, 0) + 1
        return attr.node

    def _forget(self, _path: bytes, _other: bytes, _how: int) -> None:
        """Forget nodes as if the kernel dropped its caches."""
        lookups, self._lookups = self._lookups, {}
        for node, count in lookups.items():
            self.core.nodes.forget(node, count)

    def _place(self, path: bytes) -> tuple[int, bytes]:
        folder, _, name = path.rpartition(b"/")
        return self.node(folder), name

    def _data(self, how: int) -> bytes:
        self._written += 1
        size = (10, self.block_size, self.block_size + 7, 3 * self.block_size)[how % 4]
        return (b"%d " % self._written) * (size // 3 + 1)

    def _create(self, path: bytes, _other: bytes, how: int) -> None:
        attr, handle = self.core.names.create(*self._place(path), 0o644, os.O_RDWR | os.O_EXCL, ROOT)
        self._seen(attr)
        self.core.files.write(handle, (how % 3) * self.block_size, self._data(how))
        self.core.files.release(handle)

    def _write(self, path: bytes, _other: bytes, how: int) -> None:
        node = self.node(path)
        if not stat.S_ISREG(self.core.attributes.getattr(node).st.st_mode):
            return
        handle = self.core.files.open(node, os.O_RDWR)
        self.core.files.write(handle, (how * 1000) % (5 * self.block_size), self._data(how))
        self.core.files.release(handle)

    def _truncate(self, path: bytes, _other: bytes, how: int) -> None:
        sizes = (0, 1, self.block_size, 2 * self.block_size + 5, 9 * self.block_size)
        self.core.attributes.setattr(self.node(path), SetAttr(size=sizes[how % len(sizes)]))

    def _punch(self, path: bytes, _other: bytes, how: int) -> None:
        node = self.node(path)
        if not stat.S_ISREG(self.core.attributes.getattr(node).st.st_mode):
            return
        handle = self.core.files.open(node, os.O_RDWR)
        try:
            self.core.files.fallocate(
                handle, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, how * 700, 2 * self.block_size
            )
        finally:
            self.core.files.release(handle)

    def _share(self, path: bytes, _other: bytes, how: int) -> None:
        """Share extents of another file into this one, here by copying: notes and saved blocks matter."""
        node = self.node(path)
        if not stat.S_ISREG(self.core.attributes.getattr(node).st.st_mode):
            return
        handle, source = self.core.files.open(node, os.O_RDWR), os.memfd_create("source")
        try:
            self._written += 1
            data = (b"%d " % self._written) * self.block_size
            os.write(source, data)
            with mock.patch.object(syscalls, "clone_range", copy_range):
                self.core.files.share(node, source, 0, how * 1000, self.block_size)
        finally:
            os.close(source)
            self.core.files.release(handle)

    def _mkdir(self, path: bytes, _other: bytes, how: int) -> None:
        self._seen(self.core.names.mkdir(*self._place(path), 0o755 if how % 2 else 0o700, ROOT))

    def _symlink(self, path: bytes, other: bytes, _how: int) -> None:
        self._seen(self.core.names.symlink(*self._place(path), other, ROOT))

    def _fifo(self, path: bytes, _other: bytes, _how: int) -> None:
        self._seen(self.core.names.mknod(*self._place(path), 0o010600, 0, ROOT))

    def _link(self, path: bytes, other: bytes, _how: int) -> None:
        self._seen(self.core.names.link(self.node(path), *self._place(other)))

    def _unlink(self, path: bytes, _other: bytes, _how: int) -> None:
        self.core.names.unlink(*self._place(path))

    def _rmdir(self, path: bytes, _other: bytes, _how: int) -> None:
        self.core.names.rmdir(*self._place(path))

    def _rename(self, path: bytes, other: bytes, how: int) -> None:
        self.core.names.rename(*self._place(path), *self._place(other), RENAME_NOREPLACE if how == 3 else 0)

    def _exchange(self, path: bytes, other: bytes, _how: int) -> None:
        self.core.names.rename(*self._place(path), *self._place(other), RENAME_EXCHANGE)

    def _chmod(self, path: bytes, _other: bytes, how: int) -> None:
        node = self.node(path)
        # The kernel changes no mode of a symbolic link.
        is_symlink = stat.S_ISLNK(self.core.attributes.getattr(node).st.st_mode)
        self.core.attributes.setattr(node, SetAttr(mode=None if is_symlink else 0o600 + how, uid=how))

    def _xattr(self, path: bytes, _other: bytes, how: int) -> None:
        self.core.attributes.setxattr(self.node(path), b"trusted.t%d" % (how % 2), b"v" * how, 0)

    def _utime(self, path: bytes, _other: bytes, how: int) -> None:
        self.core.attributes.setattr(self.node(path), SetAttr(atime_ns=how, mtime_ns=10**18 + how))

    def _open(self, path: bytes, _other: bytes, how: int) -> None:
        node = self.node(path)
        # A mount opens regular files only.
        if stat.S_ISREG(self.core.attributes.getattr(node).st.st_mode):
            self._handles.append(self.core.files.open(node, os.O_RDWR | (os.O_TRUNC if how == 5 else 0)))

    def _write_open(self, _path: bytes, _other: bytes, how: int) -> None:
        if self._handles:
            self.core.files.write(self._handles[how % len(self._handles)], how * 999, self._data(how))

    def _close(self, _path: bytes, _other: bytes, how: int) -> None:
        if self._handles:
            self.core.files.release(self._handles.pop(how % len(self._handles)))

    def _remove_all(self, path: bytes, _other: bytes, _how: int) -> None:
        self._remove_below(self.node(path))
        self._rmdir(path, b"", 0)

    def _remove_below(self, node: int) -> None:
        handle = self.core.directories.opendir(node)
        names = [entry[0] for entry in self.core.directories.readdir(handle, 0)]
        self.core.directories.releasedir(handle)
        for name in names:
            if name in (b".", b".."):
                continue
            try:
                self.core.names.unlink(node, name)
            except OSError:
                # The name is a directory.
                self._remove_below(self._seen(self.core.names.lookup(node, name)))
                self.core.names.rmdir(node, name)


def copy_range(source: int, source_offset: int, length: int, target: int, offset: int) -> None:
    """Copy in place of syscalls.clone_range, on any file system."""
    os.pwrite(target, os.pread(source, length, source_offset), offset)


KINDS = (
    *("create", "create", "create", "write", "write", "write", "truncate", "truncate", "punch", "share"),
    *("mkdir", "mkdir", "mkdir", "symlink", "fifo", "link", "link", "unlink", "unlink", "rmdir"),
    *("rename", "rename", "rename", "exchange", "chmod", "xattr", "utime"),
    *("open", "write_open", "close", "remove_all", "forget"),
)


def operations(min_size: int, max_size: int) -> st.SearchStrategy[list[Operation]]:
    number = st.integers(0, PATHS - 1)
    one = st.tuples(st.sampled_from(KINDS), number, number, st.integers(0, 7))
    return st.lists(one, min_size=min_size, max_size=max_size)


def open_backing(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY)
