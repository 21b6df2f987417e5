"""Child processes of the daemon: which one the kernel kills first, when another one is started, and the channel of its urgency.

Standard input of a capture or upkeep process carries the job as one line of JSON, then an `Urgency` a line
whenever it changes.

Guarantees: the newest urgency is in force within a second, for pace and precedence alike; a line that cannot
be decoded changes nothing; when the daemon ends the work goes on, and its priority rises towards the deadline
by itself.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ciuic.structs import json_decoder
from ciuic.system.io_throttle import Pace
from ciuic.system.poll import readable
from ciuic.system.precedence import Precedence
from ciuic.system.urgency import Urgency

# Pause between two updates of the precedence: the least share takes tens of seconds to change by a nice
# value.
_PERIOD_SECONDS: Final = 1.0
# The first attempts follow at once, because what the process does is missing meanwhile; a lasting cause is tried twice a minute.
RESTART_SECONDS: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_PIECE_BYTES: Final = 65536
_decoder: Final = json_decoder(Urgency)

# Adjustment of the out-of-memory score: 0 is the job's, 1000 is killed before everything else
# (proc_pid_oom_score_adj(5)).
EXPENDABLE_OOM_SCORE_ADJ: Final = "500"


def restart_pause_seconds(failures: int) -> float:
    """Return the pause before another process is started, by the number of those that ended in a row."""
    return RESTART_SECONDS[min(failures, len(RESTART_SECONDS)) - 1]


def mark_expendable(pid: int) -> None:
    """Have the kernel kill this process first when memory runs out.

    The process says the same of itself, but only after it has imported everything it needs, which is when
    memory may run out.
    """
    with suppress(OSError):  # it has ended, or /proc is not writable here
        Path(f"/proc/{pid}/oom_score_adj").write_text(EXPENDABLE_OOM_SCORE_ADJ)


class JobInput:
    """Lines that the daemon sends on one descriptor, the job first. Without a descriptor there are none."""

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd
        self._rest = b""

    @property
    def has_ended(self) -> bool:
        """True if no further line can come."""
        return self._fd < 0

    def first_line(self) -> bytes:
        """Return the job. Waits for the end of the line or of the stream."""
        while b"\n" not in self._rest and self._receive():
            pass
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def later_lines(self, wait_seconds: float) -> list[bytes]:
        """Return the lines that have come since; wait for one for `wait_seconds` at most."""
        if self.has_ended:
            # Slept all the same: the priority rises with time, whether or not a line can come.
            time.sleep(wait_seconds)
            return []
        if readable(self._fd, wait_seconds):
            self._receive()
        *lines, self._rest = self._rest.split(b"\n")
        return lines

    def _receive(self) -> bool:
        """Receive a piece; return False at the end of the stream."""
        piece = b""
        with suppress(OSError):  # the other end was reset, so no further line comes
            piece = os.read(self._fd, _PIECE_BYTES)
        self._rest += piece
        if not piece:
            self._fd = -1
        return bool(piece)


def send_urgency(fd: int, urgency: Urgency) -> bool:
    """Send an urgency to a process, without waiting, and return whether it was written.

    A line is shorter than PIPE_BUF, so it is written whole or, where the process has not read for a long time
    or is gone, not at all.
    """
    try:
        return os.write(fd, msgspec.json.encode(urgency) + b"\n") > 0
    except OSError:
        return False


def follow_urgency(job_input: JobInput, pace: Pace, precedence: Precedence) -> None:
    """Keep pace and precedence at the newest urgency, in a thread, for as long as the process lives.

    In a thread, because the work may be in a system call for seconds just when it should be raised. Call it
    after privileges were dropped.
    """
    # Capabilities belong to threads (capabilities(7)): one that was started before they were dropped would
    # keep them.
    threading.Thread(target=_follow, args=(job_input, pace, precedence), name="terms", daemon=True).start()


def _follow(job_input: JobInput, pace: Pace, precedence: Precedence) -> None:
    while True:
        for line in job_input.later_lines(_PERIOD_SECONDS):
            try:
                pace.urge(_decoder.decode(line))
            except msgspec.DecodeError as error:
                # Imported with the first event: it takes as long to load as all that such a process needs beside.
                import structlog

                structlog.get_logger(__name__).warning("terms_unreadable", error=str(error))
        # Without a line, too: the least share rises towards the deadline by itself.
        precedence.take(pace.least_share)
