"""Fault injection into modules that save overlay state, at the nth durable call.

Replaces a module's ``os`` (``faults_in``), so that the job's own requests to the file system are not
affected. It also computes what a power cut would leave of the state directory: what was synced, and by chance
some of what was not.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


class Killed(BaseException):
    """Death of the process. Not an Exception: nothing handles it."""


class FaultyOs:
    """Counter of durable calls; the one numbered ``stop_at`` (from 1) fails, half done if it is a write.

    ``error``: an errno, or None for `Killed`. With ``stay`` every later call that needs space fails too.
    """

    def __init__(self, stop_at: int = 0, error: int | None = None, *, stay: bool = False) -> None:
        self.stop_at, self.error, self.stay = stop_at, error, stay
        self.calls = 0
        self.synced: dict[int, bytes] = {}
        """Inode → the content that is durable."""
        self.synced_names: dict[int, dict[str, int]] = {}
        """Directory inode → its durable names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _fails(self, *, needs_space: bool) -> bool:
        self.calls += 1
        later = 0 < self.stop_at < self.calls and (self.error is None or (self.stay and needs_space))
        return self.calls == self.stop_at or later

    def _raise(self) -> None:
        if self.error is None:
            raise Killed
        raise OSError(self.error, os.strerror(self.error))

    def _step(self, *, needs_space: bool) -> None:
        if self._fails(needs_space=needs_space):
            self._raise()

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            self._step(needs_space=True)
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def write(self, fd: int, data: Any) -> int:
        if self._fails(needs_space=True):
            os.write(fd, bytes(data)[: len(data) // 2])
            self._raise()
        return os.write(fd, data)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if self._fails(needs_space=True):
            os.pwrite(fd, bytes(data)[: len(data) // 2], offset)
            self._raise()
        return os.pwrite(fd, data, offset)

    def fdopen(self, fd: int, mode: str) -> Any:
        return _File(self, fd) if "w" in mode else os.fdopen(fd, mode)

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        self._step(needs_space=True)
        os.ftruncate(fd, size_bytes)

    def fsync(self, fd: int) -> None:
        self._step(needs_space=True)
        ino = os.fstat(fd).st_ino
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            self.synced_names[ino] = {name: _ino(f"/proc/self/fd/{fd}/{name}") for name in os.listdir(fd)}
        else:
            self.synced[ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._step(needs_space=True)
        os.mkdir(path, mode, dir_fd=dir_fd)

    def link(self, source: Any, target: Any, **options: Any) -> None:
        self._step(needs_space=True)
        os.link(source, target, **options)

    def rename(self, source: Any, target: Any, **options: Any) -> None:
        self._step(needs_space=True)
        os.rename(source, target, **options)

    def unlink(self, path: Any, **options: Any) -> None:
        self._step(needs_space=False)
        os.unlink(path, **options)

    def after_power_cut(self, state: Path, choice: random.Random) -> None:
        """Reduce the state directory to what the disk may hold after a power cut."""
        durable = self.synced_names.get(_ino(str(state)), {})
        here = {path.name: path.stat().st_ino for path in state.iterdir() if path.is_file()}
        for name, ino in here.items():
            lost = durable.get(name) != ino and choice.random() < 0.5
            _spoil(state / name, self.synced.get(ino), lost, choice)
        # Files in this directory are never synced.
        for path in sorted(state.glob("undo/**/*"), reverse=True):
            if path.is_file() and not path.is_symlink():
                # Another name of the job's own file: only the name can be lost.
                if path.parent.name == "hold":
                    path.unlink() if choice.random() < 0.5 else None
                else:
                    _spoil(path, None, choice.random() < 0.5, choice)


class _File:
    """A file being written through `FaultyOs`, unbuffered."""

    def __init__(self, owner: FaultyOs, fd: int) -> None:
        self._owner, self._fd = owner, fd

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def write(self, data: bytes) -> int:
        return self._owner.write(self._fd, data)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def fileno(self) -> int:
        return self._fd


def _ino(path: str) -> int:
    return os.lstat(path).st_ino


def _spoil(path: Path, durable: bytes | None, lost: bool, choice: random.Random) -> None:
    if lost:
        path.unlink()
    elif durable is None:
        content = path.read_bytes()
        kind, cut = choice.randrange(4), choice.randrange(len(content) + 1)
        if kind:
            path.write_bytes((b"", content[:cut], content[:cut] + bytes(len(content) - cut))[kind - 1])


@contextmanager
def faults_in(modules: Sequence[ModuleType], faulty: FaultyOs) -> Iterator[FaultyOs]:
    """Replace the modules' ``os`` by ``faulty`` for the block."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "os", faulty))
        yield faulty


NO_SPACE, IO_ERROR = errno.ENOSPC, errno.EIO
