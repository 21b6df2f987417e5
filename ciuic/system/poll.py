"""Wait until a descriptor can be read, whatever its number, or until something holds that no event tells of.

Also: receive what a peer sent before it closed the connection.

select(2) refuses descriptors from 1024 on, and the process of a large training has such.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TypeVar

_Received = TypeVar("_Received")


def readable(fd: int, timeout_seconds: float = 0.0) -> bool:
    """Wait until a read of ``fd`` would return at once: there is data, the end, or an error.

    False after the time-out; a negative one is none.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def wait_until(holds: Callable[[], object], timeout_seconds: float, pause_seconds: float) -> bool:
    """Call ``holds`` until it returns something true, at least once; return whether it did before the time-out."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_seconds)
    return True


def receive_queued(receive: Callable[[], _Received]) -> _Received:
    """Call a receiving function, again where the peer has closed: what it had sent before is still queued.

    A peer that closes with our message unread leaves ECONNRESET, which Linux reports once, before the queued messages
    (SOCK_SEQPACKET, __skb_try_recv_datagram).

    Raises:
        OSError: nothing can be received.
    """
    try:
        return receive()
    except ConnectionResetError:
        return receive()
