"""Terms under which a process works beside the job: what it is told with its job, and what it is told while it works.

Used by captures and upkeep. Standard input carries the job as one line of JSON, then an `Urgency` a line whenever the terms change.

Guarantees: the newest terms are in force within a second, for pace and precedence alike; a line that means nothing changes nothing;
when the daemon ends the work goes on, and rises to its deadline by itself.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from ciuic.pace import Pace
from ciuic.precedence import Precedence
from ciuic.urgency import Urgency

_PERIOD_SECONDS: Final = 1.0
"""Between two looks at the least share, which takes tens of seconds to change by a nice value."""
_PIECE_BYTES: Final = 65536
_log = structlog.get_logger(__name__)
_decoder: Final = msgspec.json.Decoder(Urgency)


class Instructions:
    """Lines that the daemon sends on one descriptor: the job first. Without a descriptor nothing comes."""

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd
        self._rest = b""

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows any more."""
        return self._fd < 0

    def first_line(self) -> bytes:
        """Return the job. Waits for its end; a sender that closes its end instead of ending the line has said all, too."""
        while b"\n" not in self._rest and self._receive():
            pass
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def later_lines(self, wait_seconds: float) -> list[bytes]:
        """Return what has come since; waits for so long at most."""
        if self.has_ended:
            time.sleep(wait_seconds)
            return []
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if poll.poll(round(wait_seconds * 1000)):
            self._receive()
        *lines, self._rest = self._rest.split(b"\n")
        return lines

    def _receive(self) -> bool:
        """False at the end."""
        piece = b""
        with suppress(OSError):  # the other end was reset: nothing more comes
            piece = os.read(self._fd, _PIECE_BYTES)
        self._rest += piece
        if not piece:
            self._fd = -1
        return bool(piece)


def send_terms(fd: int, urgency: Urgency) -> bool:
    """Send new terms to a process that follows them, without waiting; whether they are on their way.

    A line is shorter than PIPE_BUF, so it is written whole or, where the process has not read for a long time or is gone, not at all.
    """
    try:
        return os.write(fd, msgspec.json.encode(urgency) + b"\n") > 0
    except OSError:
        return False


def follow(instructions: Instructions, pace: Pace, precedence: Precedence) -> None:
    """Keep pace and precedence at the newest terms, in a thread, for as long as the process lives.

    A thread, because work may be in a system call for seconds just when it should be raised. Start it when privileges are given up.
    """
    threading.Thread(target=_follow, args=(instructions, pace, precedence), name="terms", daemon=True).start()


def _follow(instructions: Instructions, pace: Pace, precedence: Precedence) -> None:
    while True:
        for line in instructions.later_lines(_PERIOD_SECONDS):
            try:
                pace.urge(_decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                _log.warning("terms_unreadable", error=str(error))
        precedence.take(pace.least_share)
