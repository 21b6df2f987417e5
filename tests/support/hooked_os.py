"""System calls of a restore with a hook before and after each, for an enemy or an observer.

Deterministic where a race would be luck: whatever can happen between two calls of another process can happen
here between any two chosen calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ciuic.restore import (
    attributes,
    content,
    destination,
    directory_handles,
    journal,
    new_files,
    run,
    targets,
    workers,
)

_MODULES = (
    attributes,
    content,
    destination,
    directory_handles,
    journal,
    workers,
    new_files,
    new_files,
    directory_handles,
    run,
    run,
    run,
    targets,
    destination,
)
CALLS = frozenset(
    [
        "open",
        "mkdir",
        "makedirs",
        "rename",
        "unlink",
        "rmdir",
        "stat",
        "fstat",
        "chown",
        "chmod",
        "utime",
        "setxattr",
        "removexattr",
        "listxattr",
        "getxattr",
        "link",
        "symlink",
        "mknod",
        "listdir",
        "readlink",
        "ftruncate",
        "fsync",
        "pread",
        "pwrite",
        "close",
    ]
)
Hook = Callable[[str, int], None]
"""Called with the name of the call and its number in the run."""


class _Hooked:
    """Module ``os``, or libc, with a hook before and after each of the calls named."""

    def __init__(
        self, real: Any, names: frozenset[str], step: Callable[[str, Callable[[], Any]], Any]
    ) -> None:
        self._real, self._names, self._step = real, names, step

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in self._names:
            return value
        return lambda *args, **options: self._step(name, lambda: value(*args, **options))


@contextmanager
def hooked(*, before: Hook | None = None, after: Hook | None = None) -> Iterator[Callable[[], int]]:
    """Make restores call the hooks for the block, one at a time; yield the number of calls so far."""
    lock = threading.RLock()
    count = 0

    def step(name: str, call: Callable[[], Any]) -> Any:
        nonlocal count
        with lock:
            count += 1
            number = count
            if before is not None:
                before(name, number)
            try:
                return call()
            finally:
                if after is not None:
                    after(name, number)

    with ExitStack() as stack:
        fake = _Hooked(os, CALLS, step)
        for module in _MODULES:
            if hasattr(module, "os"):
                stack.enter_context(mock.patch.object(module, "os", fake))
        libc = _Hooked(destination._libc, frozenset(("renameat2",)), step)
        stack.enter_context(mock.patch.object(destination, "_libc", libc))
        yield lambda: count
