"""Child processes of the daemon: how a process ended, in words, and which process the kernel kills first."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

# Adjustment of the out-of-memory score: 0 is the job's, 1000 is killed before everything else
# (proc_pid_oom_score_adj(5)).
EXPENDABLE_OOM_SCORE_ADJ: Final = "500"


def mark_expendable(pid: int) -> None:
    """Have the kernel kill this process first when memory runs out.

    The process says the same of itself, but only after it has imported everything it needs, which is when
    memory may run out.
    """
    with suppress(OSError):  # it has ended, or /proc is not writable here
        Path(f"/proc/{pid}/oom_score_adj").write_text(EXPENDABLE_OOM_SCORE_ADJ)


def describe_exit(status: int | None) -> str:
    """Return an exit status in words; a negative status is the number of the signal that killed the process."""
    if status is None:
        return "status unknown"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
