"""Contests of several processes with several threads in one directory (run by actors, judged by the test).

Every function runs ``threads`` threads, and returns what each of them did.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from support.core_driver import FOLDERS, NAMES, Operation
from support.mount_driver import KINDS, MountDriver

from ciuic.fuse_layer.system import syscalls

RECORD_BYTES = 64
SLOT_BYTES = 64
"""Bytes of each thread in a mapping that all share: less than a page, so that pages are shared too."""
_AT_FDCWD = -100
T = TypeVar("T")


def _at_once(threads: int, work: Callable[[int], T]) -> list[T]:
    results: list[Any] = [None] * threads
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=one, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return results


def histories(top: str, name: str, threads: int, seed: int, steps: int) -> None:
    """Carry out random operations, decided by the seed, in one directory for each thread below ``top``."""

    def work(number: int) -> None:
        folder = f"{top}/{name}-{number}"
        os.mkdir(folder)
        rng = random.Random(f"{seed} {name} {number}")
        driver = MountDriver(Path(folder), 4096)
        driver.furnish()
        count = len(FOLDERS) * len(NAMES)
        for _ in range(steps):
            operation: Operation = (
                rng.choice(KINDS),
                rng.randrange(count),
                rng.randrange(count),
                rng.randrange(8),
            )
            driver.do(operation)
        driver.close_all()

    _at_once(threads, work)


def appends(top: str, name: str, threads: int, count: int) -> None:
    """Append numbered records of RECORD_BYTES to one log with O_APPEND."""

    def work(number: int) -> None:
        fd = os.open(f"{top}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            for i in range(count):
                record = f"{name} {number} {i} ".encode().ljust(RECORD_BYTES - 1, b".") + b"\n"
                assert os.write(fd, record) == RECORD_BYTES
        finally:
            os.close(fd)

    _at_once(threads, work)


def counting(top: str, how: str, threads: int, count: int) -> None:
    """Add 1 to a number in a file ``count`` times in each thread, under a lock of the kind ``how``."""

    def work(_number: int) -> None:
        fd = os.open(f"{top}/number", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            for _ in range(count):
                with _locked(top, fd, how):
                    value = int(os.pread(fd, 20, 0) or b"0")
                    os.pwrite(fd, b"%020d" % (value + 1), 0)
        finally:
            os.close(fd)

    _at_once(threads, work)


@contextlib.contextmanager
def _locked(top: str, fd: int, how: str) -> Any:
    if how == "flock":
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
        fcntl.flock(fd, fcntl.LOCK_UN)
    elif how == "lockf":
        # Locks of processes: threads of one process would not exclude each other.
        fcntl.lockf(fd, fcntl.LOCK_EX)
        yield
        fcntl.lockf(fd, fcntl.LOCK_UN)
    else:
        while True:
            try:
                os.close(os.open(f"{top}/lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                break
            except FileExistsError:
                continue
        yield
        os.unlink(f"{top}/lock")


def stores(top: str, first: int, threads: int, count: int) -> None:
    """Store ``count`` numbers one after the other in each thread's own slot of a shared mapping."""

    def work(number: int) -> None:
        fd = os.open(f"{top}/shared", os.O_RDWR)
        at = (first + number) * SLOT_BYTES
        with mmap.mmap(fd, 0) as mapping:
            os.close(fd)
            for i in range(count):
                mapping[at : at + 8] = b"%08d" % (i + 1)
            mapping.flush()

    _at_once(threads, work)


_RACES: dict[str, Callable[[str, str], Any]] = {
    "create": lambda place, _: os.close(os.open(f"{place}/one", os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
    "mkdir": lambda place, _: os.mkdir(f"{place}/one"),
    "symlink": lambda place, _: os.symlink("nowhere", f"{place}/one"),
    "link": lambda place, _: os.link(f"{place}/there", f"{place}/one"),
    "unlink": lambda place, _: os.unlink(f"{place}/there"),
    "rmdir": lambda place, _: os.rmdir(f"{place}/folder"),
    "rename": lambda place, me: os.rename(f"{place}/there", f"{place}/{me}"),
    "noreplace": lambda place, me: syscalls.renameat2(
        _AT_FDCWD,
        os.fsencode(f"{place}/own-{me}"),
        _AT_FDCWD,
        os.fsencode(f"{place}/one"),
        syscalls.RENAME_NOREPLACE,
    ),
}
RACES = tuple(_RACES)
_LOST = (errno.EEXIST, errno.ENOENT)


def races(top: str, name: str, threads: int, rounds: int) -> list[tuple[str, int]]:
    """Return each race (kind, number) that a thread of this process won. The test makes the directories."""

    def work(number: int) -> list[tuple[str, int]]:
        won = []
        for kind, race in _RACES.items():
            for i in range(rounds):
                try:
                    race(f"{top}/{kind}-{i}", f"{name}-{number}")
                    won.append((kind, i))
                except OSError as error:
                    if error.errno not in _LOST:
                        raise
        return won

    return [one for each in _at_once(threads, work) for one in each]
