"""Locks of a repository: flock(2) on files of its directory, which the kernel releases when the process ends.

`Lock` is the writer's, exclusive, on the file `lock`, which names its owner.

`Claim` is shared, on the file `claim`, for content that several processes store in turn for one snapshot.
Between two of them no process holds the writer's lock and no snapshot refers to what was stored, so a prune
would free it. The process that will make the snapshot holds a claim from before the first of them until after
the snapshot. While there is a claim, nothing is swept. A process that copies the repository holds one too.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import suppress
from typing import Protocol

import msgspec

from ciuic.errors import Busy
from ciuic.repository.model import CLAIM_NAME, LOCK_NAME
from ciuic.structs import decode_json
from ciuic.system.disk import open_to_write, try_lock

# First pause, doubled up to `_POLL_SECONDS`: writers that take turns wait for no more than each other's last
# syncs.
_FIRST_POLL_SECONDS = 0.002
_POLL_SECONDS = 0.05


class Owner(msgspec.Struct):
    """Owner of the lock, for people and not for decisions: a dead owner's text stays, its lock does not."""

    pid: int = 0
    host: str = ""
    command: str = ""
    since_ns: int = 0


class Clock(Protocol):
    """The functions of `time` that waiting needs."""

    def monotonic(self) -> float:
        """Return seconds of a monotonic clock."""

    def sleep(self, seconds: float, /) -> None:
        """Sleep."""

    def time_ns(self) -> int:
        """Return the wall clock in nanoseconds."""


class Lock:
    """Exclusive lock of a repository, held from `acquire` to `release`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(
        cls, directory: str, *, wait_seconds: float = 0, command: str = "", clock: Clock = time
    ) -> Lock:
        """Take the lock, waiting up to ``wait_seconds``; then Busy, which names the owner."""
        fd = open_to_write(f"{directory}/{LOCK_NAME}", os.O_RDWR | os.O_CREAT)
        try:
            deadline, pause = clock.monotonic() + wait_seconds, _FIRST_POLL_SECONDS
            while not try_lock(fd):
                if clock.monotonic() >= deadline:
                    raise _busy(directory, fd, clock)
                # Polled, because flock(2) has no timeout.
                clock.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)
        except BaseException:
            os.close(fd)
            raise
        # The owner is written after the lock is taken, so no other process writes at the same time.
        _write_owner(fd, command or " ".join(sys.argv)[:200], clock)
        return cls(fd)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # Before close, which releases the lock: afterwards the text may be that of the next owner.
            with suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)


def _write_owner(fd: int, command: str, clock: Clock) -> None:
    owner = Owner(os.getpid(), os.uname().nodename, command, clock.time_ns())
    # On a full disk the owner's name is not worth a failure: forget and prune must work there.
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(owner), 0)


def _busy(directory: str, fd: int, clock: Clock) -> Busy:
    text = ""
    with suppress(OSError, msgspec.DecodeError):
        owner = decode_json(os.pread(fd, 4096, 0), Owner)
        seconds = max(0, clock.time_ns() - owner.since_ns) // 10**9
        text = f" by {owner.command!r} (process {owner.pid} on {owner.host}, for {seconds} s)"
    return Busy(f"the repository {directory} is being written to{text}", hint="Try again when it is done.")


class Claim:
    """Claim held from `acquire` to `release`. Several may be held at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, directory: str) -> Claim:
        """Take a claim, waiting only for processes that check whether there is one.

        Raises:
            OSError: the disk failed.
        """
        fd = open_to_write(f"{directory}/{CLAIM_NAME}", os.O_RDWR | os.O_CREAT)
        try:
            # Shared, because several claims may be held at once; only a check takes it exclusively.
            fcntl.flock(fd, fcntl.LOCK_SH)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def fileno(self) -> int:
        """Return the descriptor that holds the claim."""
        return self._fd

    def hand_over(self) -> None:
        """Close the descriptor; a process that also has it holds the claim from now on, and releases it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def release(self) -> None:
        """Release the claim, also if a forked child has the descriptor as well."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # LOCK_UN, because closing one of several duplicates of a descriptor keeps the lock (flock(2)).
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def is_claimed(directory: str) -> bool:
    """Return whether there is a claim, so that nothing may be swept.

    Call it under the repository's lock: a process that claims later also stores later.
    """
    try:
        fd = open_to_write(f"{directory}/{CLAIM_NAME}", os.O_RDWR)
    except FileNotFoundError:
        return False
    # A shared claim of any process makes the exclusive lock fail; the lock itself ends with the descriptor.
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)
