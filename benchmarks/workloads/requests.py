"""Fixed cost of a request: the two cheapest requests, one after the other.

statx(2) with AT_STATX_FORCE_SYNC causes GETATTR, closing a duplicate of a clean handle causes FLUSH. The
first figure is the rate that the caller sees, the second the rate per processor second of the server: the
number that one core could answer. If the kernel has stopped sending FLUSH, the server is idle and the second
figure is left out.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from benchmarks.suite import Figure, Job, Measured, Step, Suite
from benchmarks.timing import preparation, running

_CALLS = 100_000
_AT_EMPTY_PATH, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS = 0x1000, 0x2000, 0x7FF
_STATX_BYTES = 256
_MIN_TICKS = 5


def _make_file(job: Job) -> None:
    with open(job.path("file"), "wb") as file:
        file.write(b"content")


def server_ticks(pid: int) -> int:
    """Return the processor time of a process with its threads, in clock ticks (proc(5): utime and stime)."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _getattr(fd: int, count: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC
    for _ in range(count):
        if libc.statx(fd, b"", flags, _STATX_BASIC_STATS, answer):
            raise OSError(ctypes.get_errno(), "statx")


def _flush(fd: int, count: int) -> None:
    for _ in range(count):
        os.close(os.dup(fd))


def _step(request: str, send: Callable[[int, int], None]) -> Step:
    def run(job: Job) -> Measured:
        count = job.count(_CALLS, 2_000)
        fd = os.open(job.path("file"), os.O_RDONLY)
        try:
            # Not measured: the work that the server does once for each handle.
            send(fd, 100)
            before = server_ticks(job.server_pid) if job.server_pid else 0
            with running() as clock:
                send(fd, count)
            ticks = server_ticks(job.server_pid) - before if job.server_pid else 0
        finally:
            os.close(fd)
        per_core_second = count * os.sysconf("SC_CLK_TCK") / ticks if ticks >= _MIN_TICKS else None
        return Measured([count / clock.seconds, per_core_second])

    figures = (Figure(f"{request} requests", "/s"), Figure(f"{request} requests, a core of the server", "/s"))
    return Step(figures, run)


SUITE = Suite(
    "requests",
    (preparation(_make_file), _step("GETATTR", _getattr), _step("FLUSH", _flush)),
    places=("tmpfs",),
)
