"""Small files and names in one directory, by one process, one call after the other.

Steps: create and write, open and read, stat of uncached names, listing, rename, unlink.
"""

from __future__ import annotations

import os

from benchmarks.suite import Job, Suite
from benchmarks.timing import preparation, rate

_FILES = 10_000
_LISTINGS = 20


def _files(job: Job) -> range:
    return range(job.count(_FILES, 50))


def _make_directory(job: Job) -> None:
    os.makedirs(job.path("names"), exist_ok=True)


def _create(job: Job) -> float:
    content = b"x" * 2000
    for number in _files(job):
        with open(job.path(f"names/{number}"), "wb") as file:
            file.write(content)
    return len(_files(job))


def _read(job: Job) -> float:
    for number in _files(job):
        with open(job.path(f"names/{number}"), "rb") as file:
            file.read()
    return len(_files(job))


def _stat(job: Job) -> float:
    for number in _files(job):
        os.stat(job.path(f"names/{number}"))
    return len(_files(job))


def _list(job: Job) -> float:
    return sum(len(os.listdir(job.path("names"))) for _ in range(_LISTINGS))


def _rename(job: Job) -> float:
    for number in _files(job):
        os.rename(job.path(f"names/{number}"), job.path(f"names/r{number}"))
    return len(_files(job))


def _unlink(job: Job) -> float:
    for number in _files(job):
        os.unlink(job.path(f"names/r{number}"))
    return len(_files(job))


SUITE = Suite(
    "metadata",
    (
        preparation(_make_directory),
        rate("create + write 2 KB", "/s", _create),
        rate("open + read 2 KB", "/s", _read),
        rate("stat of uncached names", "/s", _stat, before="uncached"),
        rate("readdir", "names/s", _list),
        rate("rename", "/s", _rename),
        rate("unlink", "/s", _unlink),
    ),
)
