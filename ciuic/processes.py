"""Processes of others, by descriptor: which one it is, whose, and how it ended.

A pid names another process as soon as its own is gone; a pidfd never does. Guarantees: nothing here waits, and nothing signals.
How a process ended is known to its parent, and from Linux 6.15 on to whoever held a pidfd of it when it was reaped.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from pathlib import Path
from typing import Final

_GET_INFO: Final = 0xC040FF0B
"""PIDFD_GET_INFO of linux/pidfd.h, with the first version of struct pidfd_info."""
_INFO_EXIT: Final = 1 << 3
_INFO: Final = struct.Struct("<QQ11Ii")


def start_ticks(pid: int) -> int:
    """When the process began (field 22 of proc_pid_stat(5)), 0 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(text.rpartition(")")[2].split()[19])


def seconds_old(pid: int) -> float:
    """For how long the process has been there; 0 if there is none."""
    ticks = start_ticks(pid)
    uptime_seconds = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, uptime_seconds - ticks / os.sysconf("SC_CLK_TCK")) if ticks else 0.0


def owner(pid: int) -> int:
    """The real uid of the process; -1 if there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), -1)


def life_of(pid: int, ticks: int = 0) -> int:
    """A pidfd of the process that has this pid, and that began then. ProcessLookupError when it is gone; OSError."""
    life = os.pidfd_open(pid)
    # The descriptor is of whoever has the pid now; whether that is the one is looked at while it cannot change any more.
    if ticks and start_ticks(pid) != ticks:
        os.close(life)
        raise ProcessLookupError(f"process {pid} is another one by now")
    return life


def pid_of(life: int) -> int:
    """Of a pidfd: the pid here; -1 when it was reaped, 0 when it has none in our namespace. ValueError when it is no pidfd."""
    with open(f"/proc/self/fdinfo/{life}") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key == "Pid":
                return int(value)
    raise ValueError("not a descriptor of a process")


def end_of(life: int) -> int | None:
    """The wait status with which it ended; None while that is not to be known: it lives, was not reaped, or the kernel is older."""
    asked = bytearray(_INFO.pack(_INFO_EXIT, 0, *[0] * 11, 0))
    try:
        fcntl.ioctl(life, _GET_INFO, asked)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(asked)
    return int(status) if mask & _INFO_EXIT else None


def end_of_zombie(pid: int, ticks: int) -> int | None:
    """The same of one that has ended and was not reaped yet (field 52 of proc_pid_stat(5)); None where it was, or may not be asked.

    Only for who may trace it: to others it is zero.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[49]) if fields[0] == "Z" and int(fields[19]) == ticks else None


def describe(status: int) -> str:
    """A wait status in words: what happened to the process."""
    if os.WIFSIGNALED(status):
        return f"was killed by {signal_name(os.WTERMSIG(status))}"
    return f"ended with status {os.waitstatus_to_exitcode(status)}"


def signal_name(number: int) -> str:
    """SIGKILL, or `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
