"""Time, processor seconds and memory that a command uses, and the daemon that works for it.

Processor seconds are those of the command and its children, plus those that the daemon and its descendants
use meanwhile. Memory is polled: the largest total that all of these processes have resident at one time, and
at least the peak of the command itself. ``command_bytes`` is the same without the daemon, for commands that
do not need it. ``capture_bytes`` is the kernel's peak (VmHWM) of ciuic's capture process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_POLL_SECONDS = 0.01
_CAPTURE = b"-m\0ciuic.daemon.capture\0"
_TICKS = os.sysconf("SC_CLK_TCK")


class Used(NamedTuple):
    """Time and memory that one command used."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    command_bytes: int
    capture_bytes: int


class CommandFailed(RuntimeError):
    """The command failed; the message has the end of its standard error."""


def run(
    command: Sequence[str],
    *,
    cwd: str,
    environment: Mapping[str, str],
    daemon_pid: int = 0,
    limit_seconds: float,
) -> Used:
    """Run a command to its end and measure it.

    Raises:
        CommandFailed: It ended with an error, or was killed after ``limit_seconds``.
    """
    before = _cpu_seconds(daemon_pid)
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    memory = _MemoryPoll([process.pid, *([daemon_pid] if daemon_pid else [])])
    standard_error = _StandardError(process)
    killer = threading.Timer(limit_seconds, process.kill)
    killer.start()
    try:
        # Not Popen.wait, which discards the resource usage.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        killer.cancel()
        memory.stop()
    message = standard_error.tail()
    if process.returncode != 0:
        raise CommandFailed(f"{command[0].rpartition('/')[2]} ended with {process.returncode}: {message}")
    return Used(
        seconds,
        usage.ru_utime + usage.ru_stime + _cpu_seconds(daemon_pid) - before,
        memory.peak_bytes,
        memory.command_bytes,
        max(memory.capture_bytes.values(), default=0),
    )


class _StandardError:
    """Background thread that reads a command's standard error, so that the pipe never fills up."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self._pipe, self._text = process.stderr, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while more := os.read(self._pipe.fileno(), 1 << 16):
                self._text = (self._text + more)[-2000:]

    def tail(self) -> str:
        """Wait for the end of the pipe, and return the last 500 characters."""
        self._thread.join(5)
        return self._text.decode("utf-8", "replace").strip()[-500:]


class _MemoryPoll:
    """Background thread that polls the memory of processes and of all their descendants."""

    def __init__(self, tops: Sequence[int]) -> None:
        self.peak_bytes = self.command_bytes = 0
        self.capture_bytes: dict[int, int] = {}
        self._tops = tops
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(5)

    def _poll(self) -> None:
        # Not ru_maxrss of wait4, which includes what this process had resident when it started the command.
        own = set(self._tops[:1])
        while True:
            total_bytes = command_bytes = 0
            command = _with_descendants(self._tops[:1])
            for pid in _with_descendants(self._tops):
                # A process may end while it is read.
                with contextlib.suppress(OSError, ValueError):
                    sizes = _sizes(pid)
                    total_bytes += sizes.get("VmRSS", 0)
                    command_bytes += sizes.get("VmRSS", 0) if pid in command else 0
                    if _CAPTURE in _read(f"/proc/{pid}/cmdline"):
                        self.capture_bytes[pid] = max(self.capture_bytes.get(pid, 0), sizes.get("VmHWM", 0))
                    if pid in own:
                        self.command_bytes = max(self.command_bytes, sizes.get("VmHWM", 0))
            self.command_bytes = max(self.command_bytes, command_bytes)
            self.peak_bytes = max(self.peak_bytes, self.command_bytes, total_bytes)
            if self._end.wait(_POLL_SECONDS):
                return


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _sizes(pid: int) -> dict[str, int]:
    found = {}
    for line in _read(f"/proc/{pid}/status").decode("utf-8", "replace").splitlines():
        if line.startswith(("VmRSS:", "VmHWM:")):
            name, value, _ = line.split()
            found[name[:-1]] = int(value) * 1024
    return found


def _with_descendants(tops: Sequence[int]) -> set[int]:
    found: set[int] = set()
    waiting = list(tops)
    while waiting:
        pid = waiting.pop()
        if pid in found:
            continue
        found.add(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return found


def _cpu_seconds(daemon_pid: int) -> float:
    """Return the processor seconds of the daemon, its descendants, and those that it has waited for."""
    ticks = 0
    for pid in _with_descendants([daemon_pid]) if daemon_pid else ():
        with contextlib.suppress(OSError):
            fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS
