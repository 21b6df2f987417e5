"""Place of a process in the queues for processor and disk: a share of the time, as nice value, autogroup and I/O class.

The pace (ciuic.pace) decides when work rests. What it does between two rests still waits for a processor: beside eight busy
processes a capture of 12 MB that takes 0.09 s of processor time took 29 s at nice 19, 0.9 s at nice 3. So the share that the pace
may not go below is also the weight that the scheduler is asked for: a nice value of n weighs 1.25**-n of nice 0, which makes nice 3 of a
half and nice 19 of everything below 1.4 %.

Guarantees: nice value and autogroup always say the same, for only one of them counts (where processes are scheduled by session,
the nice value counts within its session alone: measured 0.2 % of a processor with autogroup 19 at any nice value, 16 % with autogroup 0);
where neither the process nor its parent may raise it again, it does not go further down than `MAX_NICE_WITHOUT_RETURN`. Nothing
here fails for want of a permission: a snapshot is worth more than its place.
"""

from __future__ import annotations

import math
import os
import resource
from contextlib import suppress
from typing import Final

from ciuic.ioprio import BEST_EFFORT, IDLE, IoPriority, set_io_priority
from ciuic.privileges import Capability, permitted

MAX_NICE: Final = 19
_WEIGHT_STEP: Final = 1.25
"""Ratio of the weights of two neighbouring nice values (kernel, sched_prio_to_weight)."""
MAX_NICE_WITHOUT_RETURN: Final = 10
"""Nice value where nobody may raise the process later: a tenth of a processor, so that a deadline still means something."""
_RLIMIT_NICE_OF_ZERO: Final = 20
"""RLIMIT_NICE that allows nice values down to 0 (getrlimit(2): the limit is 20 minus the nice value)."""
_BEST_EFFORT_SHARE: Final = 0.5
"""Share from which on the idle I/O class is left: it is not served at all while another process keeps the disk busy."""


def nice_of(share: float) -> int:
    """Return the nice value whose weight is this share of the weight of nice 0."""
    return min(MAX_NICE, max(0, round(-math.log(share, _WEIGHT_STEP))))


def io_priority_of(share: float, configured: IoPriority) -> IoPriority:
    """Return the I/O priority for a share: the configured one, and instead of the idle class best effort from one half on."""
    if configured.io_class != IDLE or share < _BEST_EFFORT_SHARE:
        return configured
    return IoPriority(BEST_EFFORT, 4 if share >= 1 else 7)


class Precedence:
    """Place of the calling process. Make it before privileges are given up; `take` may be called by any thread."""

    def __init__(self, io_priority: str) -> None:
        """Set what does not change; ValueError for an I/O priority that means nothing.

        SCHED_BATCH for threads that start later: waking up, they take the processor from nobody. SCHED_IDLE would starve us on a
        busy machine, and with us every process that needs a lock of the file system that we hold just then.
        """
        self._io_priority = IoPriority.parse(io_priority)
        self._min_nice = os.getpriority(os.PRIO_PROCESS, 0)
        """Nice value of the parent: a process does not rise above it."""
        self._max_nice = MAX_NICE if _may_return() else MAX_NICE_WITHOUT_RETURN
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    def take(self, share: float) -> None:
        """Take the place of this share, with all threads of the process."""
        place(os.getpid(), share, self._io_priority, min_nice=self._min_nice, max_nice=self._max_nice)


def place(
    pid: int, share: float, io_priority: IoPriority, *, min_nice: int = 0, max_nice: int = MAX_NICE
) -> None:
    """Give a process, with all its threads, the place of a share; what is not permitted stays as it is.

    Another process can be raised with CAP_SYS_NICE, or where its own RLIMIT_NICE allows it (setpriority(2)).
    """
    nice = max(min(nice_of(share), max_nice), min_nice)
    io_priority = io_priority_of(share, io_priority)
    with suppress(
        OSError
    ):  # no autogroups in this kernel; EAGAIN: another one was set within a tenth of a second
        # Of a session of its own alone: in one that it shares (a shell's) others would be slowed down with it.
        if os.getsid(pid) == pid:
            with open(f"/proc/{pid}/autogroup", "w") as file:
                file.write(str(nice))
    with suppress(OSError):  # it has ended
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):  # the thread has ended, or may not rise
                os.setpriority(os.PRIO_PROCESS, thread, nice)
            with suppress(OSError):
                set_io_priority(io_priority, thread)


def _may_return() -> bool:
    """Whether this process may be raised again when its privileges are gone: by itself, or by its parent, which has them still."""
    _, hard = resource.getrlimit(resource.RLIMIT_NICE)
    with suppress(OSError, ValueError):  # neither CAP_SYS_RESOURCE nor LimitNICE= of a unit
        resource.setrlimit(resource.RLIMIT_NICE, (_RLIMIT_NICE_OF_ZERO, max(hard, _RLIMIT_NICE_OF_ZERO)))
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    unlimited = soft == resource.RLIM_INFINITY or soft >= _RLIMIT_NICE_OF_ZERO
    return unlimited or Capability.SYS_NICE in permitted()
