"""Disk that fails at the nth operation, or a process that dies there."""

from __future__ import annotations

from typing import Any

from ciuic.repository.identity import Bytes
from ciuic.system.disk import Disk


class Killed(BaseException):
    """Raised in place of the death of the process."""


class FailingDisk(Disk):
    """Count the operations that change something; the nth fails half done, later ones fail at once."""

    def __init__(self, fail_at: int, failure: BaseException) -> None:
        self.operations = 0
        self.fail_at = fail_at
        self.failure = failure

    def _step(self) -> bool:
        """Return whether this operation is the first to fail; raise for the later ones."""
        self.operations += 1
        if self.operations > self.fail_at:
            raise self.failure
        return self.operations == self.fail_at

    def create(self, path: str, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        if self._step():
            raise self.failure
        return super().create(path, mode, dir_fd=dir_fd)

    def write_at(self, fd: int, parts: Any, offset: int) -> int:
        pieces: list[Bytes] = list(parts)
        if self._step():
            data = b"".join(bytes(piece) for piece in pieces)
            super().write_at(fd, [data[: len(data) // 2]], offset)
            raise self.failure
        return super().write_at(fd, pieces, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        if self._step():
            raise self.failure
        super().truncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        if self._step():
            raise self.failure
        super().sync(fd)

    def rename(self, source: str, target: str, *, dir_fd: int | None = None) -> None:
        if self._step():
            raise self.failure
        super().rename(source, target, dir_fd=dir_fd)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        if self._step():
            raise self.failure
        super().unlink(path, dir_fd=dir_fd)

    def sync_dir(self, path: str) -> None:
        if self._step():
            raise self.failure
        super().sync_dir(path)
