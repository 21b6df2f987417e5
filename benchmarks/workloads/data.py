"""Bulk data: new files, reads, and appends to a log.

New files are written in large, middling, odd and small pieces, by one and by four concurrent writers, and once in the place of one that is
removed; reads are cold, warm, random and mapped; the log exists and gets small appends.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Callable

from benchmarks.suite import Job, Suite
from benchmarks.timing import LARGE_BYTES, MIB, block, preparation, rate

_FILE_MIB = 512
_MIDDLING_MIB = 512
_SMALL_MIB = 128
_WRITERS = 4
_ODD_BYTES = 100_003
_APPENDS = 20_000
_RANDOM_READS = 20_000
_PIECE_BYTES = 4096


def _write(path: str, size_bytes: int, piece_bytes: int) -> None:
    piece = memoryview(block())[:piece_bytes]
    with open(path, "wb", buffering=0) as file:
        for _ in range(size_bytes // piece_bytes):
            file.write(piece)


def _size_bytes(job: Job, mib: int, unit_bytes: int = LARGE_BYTES) -> int:
    """Return a multiple of ``unit_bytes`` that is never zero, so that every step has work at any scale."""
    return max(1, round(mib * MIB * job.scale / unit_bytes)) * unit_bytes


def _remove(job: Job, *names: str) -> None:
    for name in names:
        if os.path.exists(job.path(name)):
            os.unlink(job.path(name))


def _new_file(name: str, mib: int, piece_bytes: int) -> Callable[[Job], float]:
    def work(job: Job) -> float:
        size = _size_bytes(job, mib, max(MIB, piece_bytes))
        _write(job.path(name), size, piece_bytes)
        return size / 1e6

    return work


def _odd_file(job: Job) -> float:
    size = _size_bytes(job, _MIDDLING_MIB) // _ODD_BYTES * _ODD_BYTES
    _write(job.path("odd"), size, _ODD_BYTES)
    return size / 1e6


def _replace(job: Job) -> float:
    """Remove a file and write it again, as a job does that keeps one checkpoint: its pages are freed meanwhile."""
    os.unlink(job.path("large"))
    return _new_file("large", _FILE_MIB, LARGE_BYTES)(job)


def _durable_file(job: Job) -> float:
    _write(job.path("durable"), _size_bytes(job, _MIDDLING_MIB), LARGE_BYTES)
    fd = os.open(job.path("durable"), os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return _size_bytes(job, _MIDDLING_MIB) / 1e6


def _four_writers(piece_bytes: int) -> Callable[[Job], float]:
    def work(job: Job) -> float:
        size = _size_bytes(job, _MIDDLING_MIB, LARGE_BYTES * _WRITERS)
        threads = [
            threading.Thread(target=_write, args=(job.path(f"four{number}"), size // _WRITERS, piece_bytes))
            for number in range(_WRITERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return size / 1e6

    return work


def _clear(job: Job) -> None:
    # Made here, before the clock starts.
    block()
    _remove(
        job,
        "large",
        "durable",
        "middling",
        "odd",
        "small",
        "log",
        *(f"four{number}" for number in range(_WRITERS)),
    )


def _clear_four(job: Job) -> None:
    block()
    _remove(job, *(f"four{number}" for number in range(_WRITERS)))


def _read(job: Job) -> float:
    read_bytes, piece = 0, bytearray(MIB)
    with open(job.path("large"), "rb", buffering=0) as file:
        while count := file.readinto(piece):
            read_bytes += count
    return read_bytes / 1e6


def _random_reads(job: Job) -> float:
    generator = random.Random(1)
    pieces = _size_bytes(job, _FILE_MIB) // _PIECE_BYTES
    fd = os.open(job.path("large"), os.O_RDONLY)
    count = job.count(_RANDOM_READS, 50)
    for _ in range(count):
        os.pread(fd, _PIECE_BYTES, generator.randrange(pieces) * _PIECE_BYTES)
    os.close(fd)
    return count


def _mapped_read(job: Job) -> float:
    with (
        open(job.path("large"), "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        size = len(mapped)
        for start in range(0, size, MIB):
            mapped[start : start + MIB]
    return size / 1e6


def _make_log(job: Job) -> None:
    with open(job.path("log"), "wb") as file:
        file.write(block()[:MIB])


def _append(job: Job) -> float:
    line = b"x" * 199 + b"\n"
    count = job.count(_APPENDS, 100)
    # Opened again by this process: an existing file, whose changes are tracked block by block.
    fd = os.open(job.path("log"), os.O_WRONLY | os.O_APPEND)
    for _ in range(count):
        os.write(fd, line)
    os.close(fd)
    return count


SUITE = Suite(
    "data",
    (
        preparation(_clear),
        rate("new file, 8 MiB writes", "MB/s", _new_file("large", _FILE_MIB, LARGE_BYTES)),
        rate("new file, 64 KiB writes", "MB/s", _new_file("middling", _MIDDLING_MIB, 1 << 16)),
        rate("new file, odd-sized writes", "MB/s", _odd_file),
        rate("file replaced, 8 MiB writes", "MB/s", _replace),
        rate("new file, 8 MiB writes, fsync", "MB/s", _durable_file),
        rate("new file, 8 MiB writes, four writers", "MB/s", _four_writers(LARGE_BYTES)),
        preparation(_clear_four),
        rate("new file, 64 KiB writes, four writers", "MB/s", _four_writers(1 << 16)),
        rate("new file, 4 KiB writes", "MB/s", _new_file("small", _SMALL_MIB, _PIECE_BYTES)),
        rate("cold read", "MB/s", _read, before="cold"),
        rate("warm read", "MB/s", _read, before="warm", repeat_seconds=0.3),
        rate("random cold 4 KiB reads", "/s", _random_reads, before="cold"),
        rate("mmap read, cold", "MB/s", _mapped_read, before="cold"),
        rate("mmap read, warm", "MB/s", _mapped_read, before="warm", repeat_seconds=0.3),
        preparation(_make_log),
        rate("appends of 200 bytes to a log", "/s", _append),
    ),
)
