"""Processor priority of a take-over: the job waits while no worker serves its root, so nothing may be ahead of the successor.

The process that is kept ready to become a worker raises its priority once, before it imports anything; what
it forks inherits that, goes on with the session of the worker that died, and lowers it again: its own nice
value before it starts the threads that serve, that of its scheduling group `SETTLED_SECONDS` later. Serving
is done at the priority of the daemon's environment, as before.

Measured with 8 busy processes in sessions of their own on 2 processors: see docs/benchmarks.md, "While a
worker is replaced".

Guarantees: nothing here raises, and nothing depends on it: without CAP_SYS_NICE (many containers) or a limit
of RLIMIT_NICE the take-over runs at the priority that there is.

References: setpriority(2), sched(7) "The autogroup feature".
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Final

NICE: Final = -10
"""Ahead of every process at the default priority, with nine times its share; behind what an operator put at
-11 to -20."""
SETTLED_SECONDS: Final = 1.0
"""Time after a successor's first answer in which the whole backlog of its predecessor is answered, on a busy
host too."""
_AUTOGROUP: Final = "/proc/self/autogroup"

_before: int | None = None
"""Nice value of this process, or of the one that forked it, before it was raised; None where it was not
raised."""


def raise_priority() -> None:
    """Put this process ahead of all others at the default priority, as far as that is permitted."""
    global _before
    with suppress(OSError):
        # Inherited from a daemon that was started with such a policy.
        if os.sched_getscheduler(0) in (os.SCHED_BATCH, os.SCHED_IDLE):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(NICE, before))
        _before = before
    _weigh_group(NICE)


def is_raised() -> bool:
    """Return whether this process runs at a priority that `lower_priority` has to take back."""
    return _before is not None


def take_own_group() -> None:
    """Raise the scheduling group of a session that this process has just made; call after setsid(2), which starts one at 0."""
    if is_raised():
        _weigh_group(NICE)


def lower_priority(*, group_after_seconds: float = 0.0) -> None:
    """Return to the priority of before: this thread, and all that it starts later, at once; the scheduling group later.

    Without autogroups the nice value counts alone. With them it counts within the session, and that of the
    group between sessions.
    """
    global _before
    if _before is None:
        return
    with suppress(OSError):
        # Not below 0: the filter of system calls lets a worker lower its priority, and never raise it.
        os.setpriority(os.PRIO_PROCESS, 0, max(_before, 0))
    _before = None
    if group_after_seconds:
        threading.Thread(
            target=_lower_group, args=(group_after_seconds,), name="urgency", daemon=True
        ).start()
    else:
        _weigh_group(0)


def _lower_group(after_seconds: float) -> None:
    time.sleep(after_seconds)
    _weigh_group(0)


def _weigh_group(nice: int) -> None:
    # A process that leads no session would change the priority of the whole session that it is in. The file
    # is absent where the kernel has no autogroups.
    if os.getsid(0) == os.getpid():
        with suppress(OSError), open(_AUTOGROUP, "w") as file:
            file.write(str(nice))
