"""A job that uses everything that a worker's death could break, and checks every result itself. Run as a script:

    python surviving_job.py DIRECTORY NUMBER UNTIL

Works until the file UNTIL is there. Exit status 0 and a line of JSON (rounds, longest round in seconds) when every call did
what it does on a plain directory; a traceback otherwise.
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


class Job:
    """One process's work below ``top``, in names of its own."""

    def __init__(self, top: Path, number: int) -> None:
        self._top, self._number, self._random = top, number, random.Random(number)
        self._rounds, self._logged = 0, b""
        self._log = os.open(top / f"log{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._nameless = os.open(top, os.O_TMPFILE | os.O_RDWR)
        os.write(self._nameless, b"nameless")
        self._unlinked = self._unlinked_file()
        self._table = os.open(top / f"table{number}", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._table, 8192)
        self._map = mmap.mmap(self._table, 8192)
        self._reader = os.open(top / f"table{number}", os.O_RDONLY)
        self._many = top / f"many{number}"
        self._many.mkdir()
        for index in range(300):
            (self._many / f"{index:04d}").touch()

    def _unlinked_file(self) -> int:
        path = self._top / f"unlinked{self._number}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.write(fd, b"unlinked")
        os.unlink(path)
        return fd

    def round(self) -> None:
        """Everything once."""
        self._checkpoint()
        self._names()
        self._open_files()
        if self._rounds % 8 == 0:
            self._listing()
        self._rounds += 1

    def _checkpoint(self) -> None:
        path, data = self._top / f"w{self._number}_{self._rounds % 7}", self._random.randbytes(100_000)
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        assert path.read_bytes() == data
        expect(errno.EEXIST, lambda: os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.rename(path, self._top / f"best{self._number}")
        assert (self._top / f"best{self._number}").read_bytes() == data

    def _names(self) -> None:
        a, b = self._top / f"a{self._number}", self._top / f"b{self._number}"
        a.mkdir()
        (a / "x").write_bytes(b"x")
        os.link(a / "x", b)
        assert os.stat(b).st_nlink == 2
        os.symlink("x", a / "s")
        assert os.readlink(a / "s") == "x"
        assert sorted(os.listdir(a)) == ["s", "x"]
        os.setxattr(b, "user.n", b"1", os.XATTR_CREATE)
        os.removexattr(b, "user.n")
        for path in (a / "x", a / "s", b):
            os.unlink(path)
        expect(errno.ENOENT, lambda: os.unlink(b))
        os.rmdir(a)
        assert not a.exists()

    def _open_files(self) -> None:
        record = b"%08d\n" % self._rounds
        assert os.write(self._log, record) == len(record)
        self._logged += record
        at = self._rounds % 1000 * 4
        os.pwrite(self._table, b"%04d" % (self._rounds % 10_000), at)
        assert os.pread(self._table, 4, at) == b"%04d" % (self._rounds % 10_000)
        assert os.pread(self._reader, 4, at) == b"%04d" % (self._rounds % 10_000)
        assert self._map[at : at + 4] == b"%04d" % (self._rounds % 10_000)
        assert os.pread(self._nameless, 20, 0) == b"nameless"
        assert os.pread(self._unlinked, 20, 0) == b"unlinked"
        assert os.fstat(self._unlinked).st_nlink == os.fstat(self._nameless).st_nlink == 0
        if self._rounds % 16 == 0:
            os.close(self._unlinked)
            self._unlinked = self._unlinked_file()

    def _listing(self) -> None:
        """Read slowly, so that a listing is in work when the worker dies: nothing that stays is lost or doubled."""
        with os.scandir(self._many) as entries:
            names = []
            for entry in entries:
                names.append(entry.name)
                if len(names) % 100 == 0:
                    time.sleep(0.01)
        assert sorted(names) == [f"{index:04d}" for index in range(300)]

    def end(self) -> None:
        assert (self._top / f"log{self._number}").read_bytes() == self._logged


def expect(number: int, call: Callable[[], object]) -> None:
    """``call`` fails with this errno."""
    found = 0
    try:
        call()
    except OSError as error:
        found = error.errno or 0
    assert found == number, (errno.errorcode[number], found)


def main() -> None:
    top, number, until = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    job, rounds, longest = Job(top, number), 0, 0.0
    while not until.exists():
        began = time.perf_counter()
        job.round()
        longest = max(longest, time.perf_counter() - began)
        rounds += 1
    job.end()
    sys.stdout.write(json.dumps({"rounds": rounds, "longest_seconds": longest}))


if __name__ == "__main__":
    main()
