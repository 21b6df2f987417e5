"""Simulated disk with power cuts: it computes what a cut would leave, and can fail at the nth operation."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable
from pathlib import Path

from ciuic.repository.identity import Bytes
from ciuic.system.disk import Disk


class PowerCut(BaseException):
    """Power cut. Not an Exception: no handler may catch it."""


class PowerDisk(Disk):
    """Operate on real files below ``top`` and record what of them is durable.

    ``stop_at``: number of the operation (from 1) that is not done, or half done; then ``error`` is raised.
    After an OSError later operations work again, unless ``stay_full``.
    """

    def __init__(
        self, top: Path, *, stop_at: int = 0, error: type[BaseException] = PowerCut, stay_full: bool = False
    ) -> None:
        self.top = str(top)
        self.calls = 0
        self.stop_at = stop_at
        self.error = error
        self.stay_full = stay_full
        self.contents: dict[int, bytes] = {}
        """Durable content by inode."""
        self.names: dict[str, dict[str, int]] = {}
        """Durable names by directory."""
        self._paths: dict[int, str] = {}
        self._keep: list[int] = []
        for directory, _, files in os.walk(self.top):
            self._names_durable(directory)
            for name in files:
                path = f"{directory}/{name}"
                self.contents[os.stat(path).st_ino] = Path(path).read_bytes()

    def _step(self, needs_space: bool = False) -> None:
        self.calls += 1
        after = 0 < self.stop_at < self.calls
        again = after and (self.error is PowerCut or (self.stay_full and needs_space))
        if self.calls == self.stop_at or again:
            if self.error is OSError:
                raise OSError(errno.ENOSPC, "No space left on device")
            raise self.error

    def make_dir(self, path: str, mode: int = 0o700) -> None:
        self._step(True)
        super().make_dir(path, mode)

    def create(self, path: str, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        self._step(True)
        fd = super().create(path, mode, dir_fd=dir_fd)
        # Inode numbers must not be reused while the model refers to them.
        self._keep.append(os.dup(fd))
        return fd

    def write_at(self, fd: int, parts: Iterable[Bytes], offset: int) -> int:
        parts = list(parts)
        try:
            self._step(True)
        except BaseException:
            data = b"".join(parts)
            if self.calls == self.stop_at:
                # Torn: half of the write is done.
                os.pwrite(fd, data[: len(data) // 2], offset)
            raise
        return super().write_at(fd, parts, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._step()
        super().truncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        self._step()
        size_bytes = os.fstat(fd).st_size
        self.contents[os.fstat(fd).st_ino] = os.pread(fd, size_bytes, 0)

    def rename(self, source: str, target: str, *, dir_fd: int | None = None) -> None:
        self._step()
        # The inode that loses its name here.
        if os.path.exists(target):
            self._keep.append(os.open(target, os.O_RDONLY))
        super().rename(source, target, dir_fd=dir_fd)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        self._step()
        self._keep.append(os.open(path, os.O_RDONLY))
        super().unlink(path, dir_fd=dir_fd)

    def sync_dir(self, path: str) -> None:
        self._step()
        self._names_durable(path)

    def _names_durable(self, path: str) -> None:
        path = os.path.normpath(path)
        with os.scandir(path) as found:
            self.names[path] = {
                item.name: item.inode() for item in found if item.is_file(follow_symlinks=False)
            }

    def after_power_cut(self, target: Path, choice: random.Random | None) -> None:
        """Reduce the files to what was synced, and by ``choice`` some unsynced writes."""
        for directory, _, files in os.walk(self.top):
            there = target / os.path.relpath(directory, self.top)
            there.mkdir(parents=True, exist_ok=True)
            durable = self.names[os.path.normpath(directory)]
            now = {name: os.stat(f"{directory}/{name}").st_ino for name in files}
            for name in sorted(durable.keys() | now.keys()):
                inode = durable.get(name)
                if choice is not None and choice.random() < 0.5:
                    # The directory block happened to be written.
                    inode = now.get(name)
                if inode is not None:
                    (there / name).write_bytes(self._content(inode, directory, choice))

    def _content(self, inode: int, directory: str, choice: random.Random | None) -> bytes:
        durable = self.contents.get(inode, b"")
        if choice is None:
            return durable
        current = self._current(inode, directory)
        kind = choice.randrange(4)
        if kind == 0 or current is None:
            return durable
        if kind == 1:
            return current
        cut = choice.randrange(len(current) + 1)
        # Written up to a random offset.
        if kind == 2:
            return current[: max(cut, len(durable))] if len(current) >= len(durable) else current
        # The length was written, some blocks were not: they read as zeros. Synced data stays.
        blocks = bytearray(current)
        for at in range(len(durable) // 4096 * 4096 + 4096, len(current), 4096):
            if choice.random() < 0.5:
                blocks[at : at + 4096] = bytes(len(blocks[at : at + 4096]))
        return bytes(blocks)

    def _current(self, inode: int, directory: str) -> bytes | None:
        with os.scandir(directory) as found:
            items = list(found)
        for item in items:
            if item.inode() == inode:
                return Path(item.path).read_bytes()
        for fd in self._keep:
            if os.fstat(fd).st_ino == inode:
                return os.pread(fd, os.fstat(fd).st_size, 0)
        return None

    def dispose(self) -> None:
        for fd in self._keep:
            os.close(fd)
        self._keep.clear()
