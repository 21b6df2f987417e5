"""One writer at a time: flock(2) on the file `lock`, which says who holds it. The kernel lets go of it with
the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from contextlib import suppress
from typing import Protocol

import msgspec

from ciuic.errors import Busy
from ciuic.repository.opening import open_to_write

LOCK_NAME = "lock"
_FIRST_POLL_SECONDS = 0.002
"""Writers that take turns wait for each other's last syncs."""
_POLL_SECONDS = 0.05


class Owner(msgspec.Struct):
    """Who holds the lock: for people, not for decisions (a dead owner's text stays, its lock does not)."""

    pid: int = 0
    host: str = ""
    command: str = ""
    since_ns: int = 0


class Clock(Protocol):
    """The parts of `time` that waiting needs."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...
    def time_ns(self) -> int: ...


class Lock:
    """Held from `acquire` to `release`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(
        cls, directory: str, *, wait_seconds: float = 0, command: str = "", clock: Clock = time
    ) -> Lock:
        """Waits so long; then Busy, naming the owner."""
        fd = open_to_write(f"{directory}/{LOCK_NAME}", os.O_RDWR | os.O_CREAT)
        try:
            deadline, pause = clock.monotonic() + wait_seconds, _FIRST_POLL_SECONDS
            while not _try_lock(fd):
                if clock.monotonic() >= deadline:
                    raise _busy(directory, fd, clock)
                clock.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)
        except BaseException:
            os.close(fd)
            raise
        _write_owner(fd, command or " ".join(sys.argv)[:200], clock)
        return cls(fd)

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        raise
    return True


def _write_owner(fd: int, command: str, clock: Clock) -> None:
    owner = Owner(os.getpid(), os.uname().nodename, command, clock.time_ns())
    # On a full disk the name of the owner is not worth failing for: forget and prune must work there.
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(owner), 0)


def _busy(directory: str, fd: int, clock: Clock) -> Busy:
    text = ""
    # The last two: text that is not UTF-8, and nesting without end; msgspec lets them through as they are.
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        owner = msgspec.json.decode(os.pread(fd, 4096, 0), type=Owner)
        seconds = max(0, clock.time_ns() - owner.since_ns) // 10**9
        text = f" by {owner.command!r} (process {owner.pid} on {owner.host}, for {seconds} s)"
    return Busy(f"the repository {directory} is being written to{text}", hint="Try again when it is done.")
