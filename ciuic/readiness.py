"""Tell whether a descriptor can be read, whatever its number.

select(2) refuses descriptors from 1024 on, and the process of a long job has such.
"""

from __future__ import annotations

import select


def readable(fd: int, timeout_seconds: float = 0.0) -> bool:
    """Wait until a read of ``fd`` would return at once: there is data, the end, or an error. False after the time-out."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))
