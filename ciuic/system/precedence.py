"""Scheduling precedence of a process: a share of the time, expressed as nice value, autogroup and I/O class.

The throttle (ciuic.system.io_throttle) decides when work pauses. Between two pauses the work still waits for a processor: beside
eight busy processes, a capture of 12 MB that takes 0.09 s of processor time took 29 s at nice 19 and 0.9 s at nice 3. So the least
share of the throttle is also the weight asked of the scheduler: a nice value of n weighs 1.25**-n of nice 0, which maps one half to
nice 3 and everything below 1.4 % to nice 19.

Guarantees: nice value and autogroup always have the same value, because only one of them counts (where processes are scheduled by
session, the nice value counts within its session alone: measured 0.2 % of a processor with autogroup 19 at any nice value, 16 % with
autogroup 0). Where neither the process nor its parent may raise it again, it is not lowered beyond `MAX_NICE_WITHOUT_RETURN`.
A missing permission never raises: a snapshot is worth more than its precedence.

The I/O class is set by ioprio_set(2), which Python does not wrap. The idle class has no effect under the `none` scheduler that NVMe
disks use.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
from contextlib import suppress
from typing import Final, NamedTuple

from ciuic.system.privileges import Capability, permitted

_CLASS_SHIFT = 13
_WHO_PROCESS = 1
BEST_EFFORT = 2
IDLE = 3
_CLASSES = {"none": 0, "best-effort": BEST_EFFORT, "idle": IDLE}
# glibc has no wrapper (ioprio_set(2)), and the number is another one on each architecture.
_SYSCALLS = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}


class IoPriority(NamedTuple):
    """Class and level. `io_class` is 0 none, 2 best effort or 3 idle; `level` (0 highest to 7) matters to best effort alone."""

    io_class: int
    level: int

    @classmethod
    def parse(cls, text: str) -> IoPriority:
        """Parse `idle`, `best-effort`, `best-effort:N` (N 0 to 7) or `none`; ValueError for anything else."""
        name, colon, level = text.strip().lower().partition(":")
        if name not in _CLASSES or (colon and (name != "best-effort" or level not in tuple("01234567"))):
            raise ValueError(f"{text!r} is no I/O priority: idle, best-effort:0 to best-effort:7, or none")
        # 4 is the kernel's level for a process that has set none (ioprio_set(2)).
        return cls(_CLASSES[name], int(level) if level else 4 if name == "best-effort" else 0)


def set_io_priority(priority: IoPriority, pid: int = 0) -> None:
    """Set the I/O priority of a process (0: the calling thread and the threads that it starts later).

    Does nothing on a machine whose system call number is not known here.

    Raises:
        OSError: the kernel refuses.
    """
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        return
    value = priority.io_class << _CLASS_SHIFT | priority.level
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), _WHO_PROCESS, pid, value) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


MAX_NICE: Final = 19
_WEIGHT_STEP: Final = 1.25
"""Ratio of the weights of two neighbouring nice values (kernel, sched_prio_to_weight)."""
MAX_NICE_WITHOUT_RETURN: Final = 10
"""Largest nice value where nobody may raise the process later: a tenth of a processor, so that a deadline can be met."""
_RLIMIT_NICE_OF_ZERO: Final = 20
"""RLIMIT_NICE that allows nice values down to 0 (getrlimit(2): the limit is 20 minus the nice value)."""
_BEST_EFFORT_SHARE: Final = 0.5
"""Share from which on best effort replaces the idle I/O class, which is not served while another process keeps the disk busy."""


def nice_of(share: float) -> int:
    """Return the nice value whose weight is this share of the weight of nice 0."""
    return min(MAX_NICE, max(0, round(-math.log(share, _WEIGHT_STEP))))


def io_priority_of(share: float, configured: IoPriority) -> IoPriority:
    """Return the I/O priority for a share: the configured one, but best effort instead of idle from one half on."""
    if configured.io_class != IDLE or share < _BEST_EFFORT_SHARE:
        return configured
    # 4 is the level of a process that has set none: level with the job at the deadline, behind it until then.
    return IoPriority(BEST_EFFORT, 4 if share >= 1 else 7)


class Precedence:
    """Precedence of the calling process. Must be created before privileges are dropped; `take` may be called by any thread.

    Raises:
        ValueError: the I/O priority is not one of the configuration.
    """

    def __init__(self, io_priority: str) -> None:
        self._io_priority = IoPriority.parse(io_priority)
        self._min_nice = os.getpriority(os.PRIO_PROCESS, 0)
        """Nice value of the parent: a process does not rise above it."""
        self._max_nice = MAX_NICE if _may_return() else MAX_NICE_WITHOUT_RETURN
        # SCHED_BATCH, also for threads that start later: on waking up they preempt no other process. SCHED_IDLE would starve this
        # process on a busy machine, and with it every process that needs a lock of the file system that it holds.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    def take(self, share: float) -> None:
        """Set the precedence of this share for all threads of the process."""
        place(os.getpid(), share, self._io_priority, min_nice=self._min_nice, max_nice=self._max_nice)


def place(
    pid: int, share: float, io_priority: IoPriority, *, min_nice: int = 0, max_nice: int = MAX_NICE
) -> None:
    """Set the precedence of a share for a process with all its threads; what is not permitted stays as it is.

    Another process can be raised with CAP_SYS_NICE, or where its own RLIMIT_NICE allows it (setpriority(2)).
    """
    nice = max(min(nice_of(share), max_nice), min_nice)
    io_priority = io_priority_of(share, io_priority)
    # No autogroups in this kernel; EAGAIN: another value was set within a tenth of a second.
    with suppress(OSError):
        # Only in a session of its own: in a shared one (a shell's) other processes would be slowed down with it.
        if os.getsid(pid) == pid:
            with open(f"/proc/{pid}/autogroup", "w") as file:
                file.write(str(nice))
    # The process has ended.
    with suppress(OSError):
        # On Linux nice value and I/O priority belong to a thread, not to the process (setpriority(2)).
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            # The thread has ended, or may not be raised.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, nice)
            with suppress(OSError):
                set_io_priority(io_priority, thread)


def _may_return() -> bool:
    """Return whether this process may be raised after its privileges are dropped, by itself or by its privileged parent."""
    _, hard = resource.getrlimit(resource.RLIMIT_NICE)
    # Refused without CAP_SYS_RESOURCE and without LimitNICE= of a unit.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NICE, (_RLIMIT_NICE_OF_ZERO, max(hard, _RLIMIT_NICE_OF_ZERO)))
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    unlimited = soft == resource.RLIM_INFINITY or soft >= _RLIMIT_NICE_OF_ZERO
    return unlimited or Capability.SYS_NICE in permitted()
