"""Small files and names in one directory, by one process: one call after the other, and by four threads.

Steps: create and write, stat of the new names, open and read, stat of uncached names, listing, rename, unlink.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.suite import Job, Suite
from benchmarks.timing import preparation, rate

_FILES = 10_000
_LISTINGS = 20
_THREADS = 4
_CONTENT = b"x" * 2000


def _files(job: Job) -> range:
    return range(job.count(_FILES, 50))


def _make_directory(job: Job) -> None:
    os.makedirs(job.path("names"), exist_ok=True)


def _create(path: str) -> None:
    with open(path, "wb") as file:
        file.write(_CONTENT)


def _read(path: str) -> None:
    with open(path, "rb") as file:
        file.read()


def _in_turn(call: Callable[[str], object], prefix: str = "") -> Callable[[Job], float]:
    def work(job: Job) -> float:
        files = _files(job)
        for number in files:
            call(job.path(f"names/{prefix}{number}"))
        return len(files)

    return work


def _by_threads(call: Callable[[str], object]) -> Callable[[Job], float]:
    def share(paths: Iterable[str]) -> None:
        for path in paths:
            call(path)

    def work(job: Job) -> float:
        paths = [job.path(f"names/t{number}") for number in _files(job)]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(share, [paths[first::_THREADS] for first in range(_THREADS)]))
        return len(paths)

    return work


def _list(job: Job) -> float:
    return sum(len(os.listdir(job.path("names"))) for _ in range(_LISTINGS))


def _rename(job: Job) -> float:
    for number in _files(job):
        os.rename(job.path(f"names/{number}"), job.path(f"names/r{number}"))
    return len(_files(job))


SUITE = Suite(
    "metadata",
    (
        preparation(_make_directory),
        rate("create + write 2 KB", "/s", _in_turn(_create)),
        rate("stat of names just made", "/s", _in_turn(os.stat)),
        rate("open + read 2 KB", "/s", _in_turn(_read)),
        rate("stat of uncached names", "/s", _in_turn(os.stat), before="uncached"),
        rate("readdir", "names/s", _list),
        rate("rename", "/s", _rename),
        rate("unlink", "/s", _in_turn(os.unlink, "r")),
        rate("create + write 2 KB, four threads", "/s", _by_threads(_create)),
        rate("stat of uncached names, four threads", "/s", _by_threads(os.stat), before="uncached"),
        rate("unlink, four threads", "/s", _by_threads(os.unlink)),
    ),
)
