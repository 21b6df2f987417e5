"""Watch of the process's own system calls for contents and names that were never synced.

Complements power_disk.py, which shows what a missing sync costs: some are only needed together with a second
failure, or prevent a loss that would show after years. Here the order itself is checked. Only changes through
``os`` or ``Path`` are seen, which is how everything durable is written; contents are compared by size, so
that a write through a file object counts too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_NAMING = ("mkdir", "unlink", "rmdir", "symlink", "mknod", "mkfifo")
_MOVING = ("rename", "replace", "link")
_CHANGING = ("chmod", "chown", "utime", "setxattr")
_WRITING = ("write", "pwrite", "pwritev", "ftruncate")


class SyncWatch:
    """Watch that works from its creation to the end of the test."""

    def __init__(self, patch: pytest.MonkeyPatch, top: Path) -> None:
        self._top = str(top)
        self._synced: dict[int, int] = {}
        """Inode → its size when it was synced, and nothing written since."""
        self._names: set[str] = set()
        """Directories with a name that is not durable."""
        self.renamed_unsynced: list[str] = []
        """Final names that were given to unsynced content."""
        self._real = {
            name: getattr(os, name)
            for name in (*_NAMING, *_MOVING, *_CHANGING, *_WRITING, "open", "fsync", "fdatasync")
        }
        for name in _NAMING:
            patch.setattr(os, name, self._naming(name))
        for name in _MOVING:
            patch.setattr(os, name, self._moving(name))
        for name in _CHANGING:
            patch.setattr(os, name, self._changing(name))
        for name in _WRITING:
            patch.setattr(os, name, self._writing(name))
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._syncing(name))
        patch.setattr(os, "open", self._open)

    # -- queries

    def is_synced(self, path: str | Path) -> bool:
        """Return whether the file's present content was synced."""
        facts = os.lstat(path)
        return self._synced.get(facts.st_ino) == facts.st_size

    def unsynced(self, *spared: str) -> list[str]:
        """Return unsynced directories and files below ``top``; ``spared`` are path suffixes."""
        found = sorted(self._names)
        for directory, _, files in os.walk(self._top):
            paths = (f"{directory}/{name}" for name in files)
            found += [path for path in paths if not os.path.islink(path) and not self.is_synced(path)]
        found = [path for path in found if path.startswith(self._top) and os.path.exists(path)]
        return [
            os.path.relpath(path, self._top) for path in found if not path.endswith(tuple(spared) or ("\0",))
        ]

    def trust_all(self) -> None:
        """Count everything there as durable."""
        self._names.clear()
        for directory, _, files in os.walk(self._top):
            for name in files:
                facts = os.lstat(f"{directory}/{name}")
                self._synced[facts.st_ino] = facts.st_size

    def trust_nothing(self) -> None:
        """Count everything there as unsynced, as if another program had written it."""
        self._synced.clear()

    # -- replacements in os

    def _naming(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            result = self._real[name](path, *args, **options)
            self._named(path, options.get("dir_fd"))
            return result

        return call

    def _moving(self, name: str) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            kept = _path(source, options.get("src_dir_fd"))
            if (
                name != "link"
                and os.path.isfile(kept)
                and not os.path.islink(kept)
                and not self.is_synced(kept)
            ):
                self.renamed_unsynced.append(_path(target, options.get("dst_dir_fd")))
            result = self._real[name](source, target, **options)
            self._named(target, options.get("dst_dir_fd"))
            if name != "link":
                self._named(source, options.get("src_dir_fd"))
            return result

        return call

    def _changing(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            result = self._real[name](path, *args, **options)
            if options.get("follow_symlinks", True) and options.get("dir_fd") is None:
                self._synced.pop(os.stat(path).st_ino, None)
            return result

        return call

    def _writing(self, name: str) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            self._synced.pop(os.fstat(fd).st_ino, None)
            return self._real[name](fd, *args)

        return call

    def _syncing(self, name: str) -> Callable[..., Any]:
        def call(fd: int) -> None:
            self._real[name](fd)
            path = os.readlink(f"/proc/self/fd/{fd}")
            if os.path.isdir(path):
                self._names.discard(path)
            else:
                facts = os.fstat(fd)
                self._synced[facts.st_ino] = facts.st_size

        return call

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        new = flags & os.O_CREAT and not os.path.lexists(_path(path, dir_fd))
        fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if new:
            self._named(path, dir_fd)
            self._synced.pop(os.fstat(fd).st_ino, None)
        return fd

    def _named(self, path: Any, dir_fd: int | None) -> None:
        self._names.add(os.path.dirname(_path(path, dir_fd)))


def _path(path: Any, dir_fd: int | None) -> str:
    text = os.fsdecode(path)
    if dir_fd is not None:
        text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
    return os.path.normpath(os.path.abspath(text))
