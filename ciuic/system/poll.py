"""Wait until a descriptor can be read, whatever its number; receive an answer whose sender has closed the connection.

select(2) refuses descriptors from 1024 on, and the process of a large training has such.
"""

from __future__ import annotations

import select
import socket


def readable(fd: int, timeout_seconds: float = 0.0) -> bool:
    """Wait until a read of ``fd`` would return at once: there is data, the end, or an error. False after the time-out."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def receive_answer(connection: socket.socket, max_bytes: int) -> bytes:
    """Receive the answer to a message that the peer may have refused unread. OSError.

    A peer that closes with our message unread leaves ECONNRESET, which Linux reports before the queued answer (SOCK_SEQPACKET,
    __skb_try_recv_datagram).
    """
    try:
        return connection.recv(max_bytes)
    except ConnectionResetError:
        return connection.recv(max_bytes)
