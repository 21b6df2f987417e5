"""What the ranks' writers tell the one that makes the snapshot: which files each has stored, through the repository's directory.

`parts/TOKEN/RANK` is one rank's answer for one snapshot. Its writer has it locked (flock) from before it stores until all is there, so a
file that nobody has locked and that is not whole belongs to a writer that died. The snapshot's writer waits for all of them, and clears the
directory when it is done, also of what dead runs have left. Trainers are not needed for any of this: when all were killed after they handed over
their parts, the snapshot comes to be.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from ciuic.training.messages import StoredFile, Together

PARTS_DIR: Final = "parts"
_BEGIN_SECONDS: Final = 120.0
"""All ranks stage at one boundary: so long after the first of them the last must have begun."""
_ORPHAN_BEGIN_SECONDS: Final = 5.0
"""The same limit once this writer's own trainer is gone. Ranks hand over within one step of each other; those that have not by
then were usually killed with it, and a writer must not stay behind for two minutes."""
_STALE_SECONDS: Final = 86400.0
_POLL_SECONDS: Final = (0.002, 0.05)


class _Answer(msgspec.Struct, frozen=True):
    problem: str
    files: list[StoredFile]


class Answer:
    """One rank's, while it is being made."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def stored(self, files: list[StoredFile]) -> None:
        """All of them, durably."""
        self._write(_Answer("", files))

    def failed(self, problem: str) -> None:
        self._write(_Answer(problem or "unknown", []))

    def _write(self, answer: _Answer) -> None:
        data = memoryview(msgspec.msgpack.encode(answer))
        while data:
            data = data[os.write(self._fd, data) :]


@contextmanager
def answer(repository: str, together: Together) -> Iterator[Answer]:
    """To be entered before anything is stored. OSError."""
    folder = _folder(repository, together.token)
    os.makedirs(folder, 0o700, exist_ok=True)
    name = f"{folder}/{together.rank}"
    fd = os.open(f"{name}.begin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.rename(f"{name}.begin", name)
        yield Answer(fd)
    finally:
        os.close(fd)


def refuse(repository: str, together: Together, problem: str) -> None:
    """This rank has nothing to store for it. OSError."""
    with answer(repository, together) as mine:
        mine.failed(problem)


def collect(
    repository: str, together: Together, trainer_is_gone: Callable[[], bool] = lambda: False
) -> list[StoredFile]:
    """Return what all other ranks have stored, once all have.

    Args:
        repository: the directory of the repository.
        together: the snapshot, and this process's rank.
        trainer_is_gone: whether the trainer of this rank has ended. Ranks that have not begun by then are given up sooner.

    Raises:
        OSError: a rank has not begun in time, has failed, or died. The text names the rank.
    """
    found: list[StoredFile] = []
    begun_by = _Deadline(trainer_is_gone)
    for rank in range(together.world_size):
        if rank != together.rank:
            found += _of_rank(f"{_folder(repository, together.token)}/{rank}", rank, begun_by)
    return found


def clear(repository: str, token: str) -> None:
    """Of this snapshot, and of those of dead runs."""
    shutil.rmtree(_folder(repository, token), ignore_errors=True)
    with suppress(OSError), os.scandir(f"{repository}/{PARTS_DIR}") as others:
        for other in others:
            if time.time() - other.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(other.path, ignore_errors=True)


class _Deadline:
    """When every rank must have begun."""

    def __init__(self, trainer_is_gone: Callable[[], bool]) -> None:
        self._trainer_is_gone = trainer_is_gone
        self._at_seconds = time.monotonic() + _BEGIN_SECONDS
        self._is_orphan = False

    def has_passed(self) -> bool:
        if not self._is_orphan and self._trainer_is_gone():
            self._is_orphan = True
            self._at_seconds = min(self._at_seconds, time.monotonic() + _ORPHAN_BEGIN_SECONDS)
        return time.monotonic() > self._at_seconds


def _of_rank(path: str, rank: int, begun_by: _Deadline) -> list[StoredFile]:
    pause, longest = _POLL_SECONDS
    while True:
        try:
            data = _unlocked(path)
        except FileNotFoundError:
            if begun_by.has_passed():
                raise OSError(f"rank {rank} has not handed over its part") from None
            data = None
        if data is not None:
            break
        time.sleep(pause)
        pause = min(2 * pause, longest)
    try:
        said = msgspec.msgpack.decode(data, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise OSError(f"the writer of rank {rank} died") from None
    if said.problem:
        raise OSError(f"rank {rank}: {said.problem}")
    return said.files


def _unlocked(path: str) -> bytes | None:
    """What it holds; None while its writer is at work."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    except BlockingIOError:
        return None
    finally:
        os.close(fd)


def _folder(repository: str, token: str) -> str:
    return f"{repository}/{PARTS_DIR}/{token}"
