"""Facts about other processes by pidfd: identity, owner and exit status.

A pid may name another process as soon as its own is gone; a pidfd never does. Guarantees: nothing here waits or signals. The exit
status of a process is known to its parent, and from Linux 6.15 on to every process that held a pidfd of it when it was reaped.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from pathlib import Path
from typing import Final

_GET_INFO: Final = 0xC040FF0B
"""Request PIDFD_GET_INFO of linux/pidfd.h, with the first version of struct pidfd_info."""
_INFO_EXIT: Final = 1 << 3
_INFO: Final = struct.Struct("<QQ11Ii")


def boot_id() -> str:
    """Return the identity of this boot of the kernel, within which a pid and its start time name a process."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stat_fields(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the third on: state, parent …; none if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    # Counted from the parenthesis after the name, field 2: the name may have blanks and parentheses itself.
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """Return the start time of the process in clock ticks (field 22 of proc_pid_stat(5)); 0 if there is none."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def seconds_old(pid: int) -> float:
    """Return the age of the process in seconds; 0 if there is none."""
    ticks = start_ticks(pid)
    uptime_seconds = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, uptime_seconds - ticks / os.sysconf("SC_CLK_TCK")) if ticks else 0.0


def owner(pid: int) -> int:
    """Return the real uid of the process; -1 if there is none."""
    return int(_status(pid, b"Uid:") or -1)


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for a signal."""
    return bool(int(_status(pid, b"SigCgt:") or b"0", 16) >> (number - 1) & 1)


def own_pid(pid: int) -> int:
    """Return the pid that the process has for itself, in the innermost of its pid namespaces; 0 if there is none."""
    return int(_status(pid, b"NSpid:", -1) or 0)


def _status(pid: int, key: bytes, at: int = 1) -> bytes:
    """Return a value of a line of /proc/PID/status, the first if not told; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
    # Not splitlines(), and no text mode: a process may have a carriage return and "Uid:" in its name, of
    # which the kernel escapes newlines and backslashes alone.
    return next((line.split()[at] for line in text.split(b"\n") if line.startswith(key)), b"")


def life_of(pid: int, ticks: int = 0) -> int:
    """Return a pidfd of the process with this pid and start time.

    Raises:
        ProcessLookupError: the process is gone.
        OSError: the kernel refuses.
    """
    life = os.pidfd_open(pid)
    # The descriptor belongs to the process that has the pid now. Its start time is compared afterwards: as long as the descriptor
    # names a living process, no other one can get the pid.
    if ticks and start_ticks(pid) != ticks:
        os.close(life)
        raise ProcessLookupError(f"process {pid} was replaced by another one with the same pid")
    return life


def pid_of(life: int) -> int:
    """Return the pid of a pidfd; -1 when the process was reaped, 0 when it has no pid in this namespace.

    Raises:
        ValueError: the descriptor is no pidfd.
    """
    # Binary, so that lines end at newlines alone: the caller's descriptor may be an io_uring, which lists
    # names of files.
    with open(f"/proc/self/fdinfo/{life}", "rb") as file:
        for line in file:
            key, _, value = line.partition(b":")
            if key == b"Pid":
                return int(value)
    raise ValueError("not a pidfd")


def end_of(life: int) -> int | None:
    """Return the wait status of an ended process; None while it lives or was not reaped, and on a kernel before Linux 6.15."""
    asked = bytearray(_INFO.pack(_INFO_EXIT, 0, *[0] * 11, 0))
    try:
        fcntl.ioctl(life, _GET_INFO, asked)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(asked)
    return int(status) if mask & _INFO_EXIT else None


def end_of_zombie(pid: int, ticks: int) -> int | None:
    """Return the wait status of a process that has ended and was not reaped (field 52 of proc_pid_stat(5)); otherwise None.

    The kernel shows the status only to a process that may trace it; to others it is zero.
    """
    fields = stat_fields(pid)
    return int(fields[49]) if fields and fields[0] == "Z" and int(fields[19]) == ticks else None


def describe(status: int) -> str:
    """Describe a wait status in words."""
    if os.WIFSIGNALED(status):
        return f"was killed by {signal_name(os.WTERMSIG(status))}"
    return f"ended with status {os.waitstatus_to_exitcode(status)}"


def describe_exit(status: int | None) -> str:
    """Return an exit status in words; a negative status is the number of the signal that killed the process."""
    if status is None:
        return "status unknown"
    if status < 0:
        return f"killed by {signal_name(-status)}"
    return f"exit status {status}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; `signal 40` without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
