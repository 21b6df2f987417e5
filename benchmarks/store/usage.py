"""What a command took: time, processor seconds and memory, of itself and of the daemon that works for it.

Processor seconds are those of the command with its children, and what the daemon with all its descendants has used
meanwhile. Memory is polled: the most that all of these processes together had resident at one time, and never less than
any of the command's own had. ``command_bytes`` is the same without the daemon, for commands that need none. ``capture_bytes`` is the peak of ciuic's capture process as the kernel noted it.
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
    """Of one command."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    command_bytes: int
    capture_bytes: int


class CommandFailed(RuntimeError):
    """The command ended with an error; the message has its last words."""


def run(
    command: Sequence[str],
    *,
    cwd: str,
    environment: Mapping[str, str],
    daemon_pid: int = 0,
    limit_seconds: float,
) -> Used:
    """Runs it to its end. CommandFailed when it fails."""
    before = _cpu_seconds(daemon_pid)
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    watch = _Watch([process.pid, *([daemon_pid] if daemon_pid else [])])
    said = _Said(process)
    killer = threading.Timer(limit_seconds, process.kill)
    killer.start()
    try:
        # Not Popen.wait: it throws the usage away.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        killer.cancel()
        watch.stop()
    text = said.text()
    if process.returncode != 0:
        raise CommandFailed(f"{command[0].rpartition('/')[2]} ended with {process.returncode}: {text}")
    return Used(
        seconds,
        usage.ru_utime + usage.ru_stime + _cpu_seconds(daemon_pid) - before,
        watch.peak_bytes,
        watch.command_bytes,
        max(watch.capture_bytes.values(), default=0),
    )


class _Said:
    """Reads what the command says on standard error, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self._pipe, self._text = process.stderr, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while more := os.read(self._pipe.fileno(), 1 << 16):
                self._text = (self._text + more)[-2000:]

    def text(self) -> str:
        """The end of it."""
        self._thread.join(5)
        return self._text.decode("utf-8", "replace").strip()[-500:]


class _Watch:
    """Polls the memory of some processes and all that descend from them."""

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
        # Not ru_maxrss of wait4: it includes what this process had resident when it started the command.
        own = set(self._tops[:1])
        while True:
            together = of_command = 0
            command = _with_descendants(self._tops[:1])
            for pid in _with_descendants(self._tops):
                with contextlib.suppress(OSError, ValueError):  # it ended while we looked
                    sizes = _sizes(pid)
                    together += sizes.get("VmRSS", 0)
                    of_command += sizes.get("VmRSS", 0) if pid in command else 0
                    if _CAPTURE in _read(f"/proc/{pid}/cmdline"):
                        self.capture_bytes[pid] = max(self.capture_bytes.get(pid, 0), sizes.get("VmHWM", 0))
                    if pid in own:
                        self.command_bytes = max(self.command_bytes, sizes.get("VmHWM", 0))
            self.command_bytes = max(self.command_bytes, of_command)
            self.peak_bytes = max(self.peak_bytes, self.command_bytes, together)
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
    """Of the daemon, its living descendants, and those whose end it has taken note of."""
    ticks = 0
    for pid in _with_descendants([daemon_pid]) if daemon_pid else ():
        with contextlib.suppress(OSError):
            fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS
