"""Whether a descriptor can be read, whatever its number: select(2) refuses those from 1024 on, which a long job has."""

from __future__ import annotations

import select


def readable(fd: int, timeout_seconds: float = 0.0) -> bool:
    """Waits so long for data, the end, or an error: for whatever makes a read return at once."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))
