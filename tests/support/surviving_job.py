"""Job that uses everything that a worker's death could break, and checks every result itself.

    python surviving_job.py DIRECTORY NUMBER UNTIL [mounts-change]

Works until the file UNTIL exists, and writes the number of its rounds into the file UNTIL.rounds.
``mounts-change``: an overlay comes and goes meanwhile, so that a call of two paths may find one of them above
and one below it (EXDEV, as at every mount and unmount); such a call is repeated once. Exits with 0 and prints
a line of JSON (rounds, the longest one, calls, the long ones) when every call did what it does on a plain
directory; a traceback otherwise. Each system call is timed by itself: the long ones are reported with their
start time.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONG_SECONDS = 0.005
"""Calls that took longer are reported one by one."""


class Timed:
    """Module ``os``, each call of which is timed."""

    def __init__(self) -> None:
        self.calls = 0
        self.long: list[tuple[str, float, float]] = []
        """(Call, wall clock when it began, seconds)."""

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                seconds = time.perf_counter() - began
                self.calls += 1
                if seconds >= LONG_SECONDS:
                    self.long.append((name, time.time() - seconds, seconds))

        setattr(self, name, timed)
        return timed


timed = Timed()


def write_file(path: Path, data: bytes, flags: int = 0) -> None:
    fd = timed.open(path, os.O_WRONLY | os.O_CREAT | flags)
    assert timed.write(fd, data) == len(data)
    timed.close(fd)


def read_file(path: Path) -> bytes:
    fd, pieces = timed.open(path, os.O_RDONLY), []
    while piece := timed.read(fd, 1 << 20):
        pieces.append(piece)
    timed.close(fd)
    return b"".join(pieces)


class Job:
    """Work of one process below ``top``, under names of its own."""

    def __init__(self, top: Path, number: int, *, mounts_change: bool = False) -> None:
        self._mounts_change = mounts_change
        self._top, self._number, self._random = top, number, random.Random(number)
        self._rounds, self._logged = 0, b""
        self._log = timed.open(top / f"log{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._nameless = timed.open(top, os.O_TMPFILE | os.O_RDWR)
        timed.write(self._nameless, b"nameless")
        self._unlinked = self._unlinked_file()
        self._removed = self._removed_directory()
        self._table = timed.open(top / f"table{number}", os.O_RDWR | os.O_CREAT)
        timed.ftruncate(self._table, 8192)
        self._map = mmap.mmap(self._table, 8192)
        self._reader = timed.open(top / f"table{number}", os.O_RDONLY)
        self._many = top / f"many{number}"
        self._many.mkdir()
        for index in range(300):
            (self._many / f"{index:04d}").touch()

    def _unlinked_file(self) -> int:
        path = self._top / f"unlinked{self._number}"
        fd: int = timed.open(path, os.O_RDWR | os.O_CREAT)
        timed.write(fd, b"unlinked")
        timed.unlink(path)
        return fd

    def _removed_directory(self) -> int:
        path = self._top / f"removed{self._number}"
        timed.mkdir(path)
        fd: int = timed.open(path, os.O_RDONLY | os.O_DIRECTORY)
        timed.rmdir(path)
        return fd

    def round(self) -> None:
        """Do every kind of work once."""
        self._checkpoint()
        self._names()
        self._open_files()
        self._gone_directory()
        if self._rounds % 8 == 0:
            self._listing()
        self._rounds += 1

    def _checkpoint(self) -> None:
        path, data = self._top / f"w{self._number}_{self._rounds % 7}", self._random.randbytes(100_000)
        fd = timed.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        assert timed.write(fd, data) == len(data)
        timed.fsync(fd)
        timed.close(fd)
        assert read_file(path) == data
        expect(errno.EEXIST, lambda: timed.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        self._with_both(timed.rename, path, self._top / f"best{self._number}")
        assert read_file(self._top / f"best{self._number}") == data

    def _with_both(self, call: Callable[[Path, Path], object], old: Path, new: Path) -> None:
        try:
            call(old, new)
        except OSError as error:
            if error.errno != errno.EXDEV or not self._mounts_change:
                raise
            call(old, new)

    def _names(self) -> None:
        a, b = self._top / f"a{self._number}", self._top / f"b{self._number}"
        timed.mkdir(a)
        write_file(a / "x", b"x")
        self._with_both(timed.link, a / "x", b)
        assert timed.stat(b).st_nlink == 2
        timed.symlink("x", a / "s")
        assert timed.readlink(a / "s") == "x"
        assert sorted(timed.listdir(a)) == ["s", "x"]
        timed.setxattr(b, "user.n", b"1", os.XATTR_CREATE)
        timed.removexattr(b, "user.n")
        for path in (a / "x", a / "s", b):
            timed.unlink(path)
        expect(errno.ENOENT, lambda: timed.unlink(b))
        timed.rmdir(a)
        expect(errno.ENOENT, lambda: timed.stat(a))

    def _open_files(self) -> None:
        record = b"%08d\n" % self._rounds
        assert timed.write(self._log, record) == len(record)
        self._logged += record
        at = self._rounds % 1000 * 4
        timed.pwrite(self._table, b"%04d" % (self._rounds % 10_000), at)
        assert timed.pread(self._table, 4, at) == b"%04d" % (self._rounds % 10_000)
        assert timed.pread(self._reader, 4, at) == b"%04d" % (self._rounds % 10_000)
        assert self._map[at : at + 4] == b"%04d" % (self._rounds % 10_000)
        assert timed.pread(self._nameless, 20, 0) == b"nameless"
        assert timed.pread(self._unlinked, 20, 0) == b"unlinked"
        assert timed.fstat(self._unlinked).st_nlink == timed.fstat(self._nameless).st_nlink == 0
        if self._rounds % 16 == 0:
            timed.close(self._unlinked)
            self._unlinked = self._unlinked_file()

    def _gone_directory(self) -> None:
        """Check that a removed working directory has attributes, can be entered, and nothing else."""
        fd = self._removed
        assert timed.fstat(fd).st_nlink == 0
        expect(errno.ENOENT, lambda: timed.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        expect(errno.ENOENT, lambda: timed.stat("x", dir_fd=fd))
        assert timed.listdir(fd) == []
        timed.fchdir(fd)
        expect(errno.ENOENT, lambda: timed.mkdir("y"))
        timed.close(timed.open(".", os.O_RDONLY | os.O_DIRECTORY))
        timed.chdir("/")
        if self._rounds % 16 == 0:
            timed.close(fd)
            self._removed = self._removed_directory()

    def _listing(self) -> None:
        """List slowly, so that the worker dies during a listing: no name that stays is lost or doubled."""
        with timed.scandir(self._many) as entries:
            names = []
            for entry in entries:
                names.append(entry.name)
                if len(names) % 100 == 0:
                    time.sleep(0.01)
        assert sorted(names) == [f"{index:04d}" for index in range(300)]

    def end(self) -> None:
        assert read_file(self._top / f"log{self._number}") == self._logged


def expect(number: int, call: Callable[[], object]) -> None:
    """Check that ``call`` fails with this errno."""
    found = 0
    try:
        call()
    except OSError as error:
        found = error.errno or 0
    assert found == number, (errno.errorcode[number], found)


def main() -> None:
    top, number, until = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    job, rounds, longest = Job(top, number, mounts_change=sys.argv[4:] == ["mounts-change"]), 0, 0.0
    while not until.exists():
        began = time.perf_counter()
        job.round()
        longest = max(longest, time.perf_counter() - began)
        rounds += 1
        Path(f"{until}.rounds").write_text(str(rounds))
    job.end()
    report = {"rounds": rounds, "longest_seconds": longest, "calls": timed.calls, "long": timed.long}
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
