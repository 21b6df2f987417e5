"""Simulated death of a process at a chosen system call, one of the changing calls of an `os`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any, Final

NAME_CALLS: Final = frozenset(
    ("link", "unlink", "rename", "mkdir", "rmdir", "symlink", "mknod", "open", "chmod", "setxattr", "ftruncate")
)  # fmt: skip
DATA_CALLS: Final = frozenset(("chown", "utime", "removexattr", "write", "pwrite", "posix_fallocate"))
ENDLESS: Final = -1


class Killed(BaseException):
    """Death of the process. No program catches it."""


class Steps:
    """Countdown to the death; ``left``: steps until then, ENDLESS for none.

    Each call is two steps: before it and after it.
    """

    def __init__(self, left: int = ENDLESS) -> None:
        self.left = left
        self.is_dead = False

    def __call__(self, call: Callable[[], Any]) -> Any:
        self._count()
        result = call()
        self._count()
        return result

    def _count(self) -> None:
        if self.left > 0:
            self.left -= 1
            self.is_dead = self.is_dead or not self.left
        # Calls made while the stack unwinds are not carried out either.
        if self.is_dead:
            raise Killed


class DyingOs:
    """Module `os` for the module under test: ``calls`` are steps, all else is the real thing."""

    def __init__(self, steps: Steps, calls: Collection[str] = NAME_CALLS) -> None:
        self._steps = steps
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if name not in self._calls:
            return value
        return lambda *args, **options: self._steps(lambda: value(*args, **options))
