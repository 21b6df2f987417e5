"""Callers of the daemon's sockets, well-behaved and hostile. Few imports: each attacker is an interpreter of its own."""

from __future__ import annotations

import socket
import time
from array import array
from collections.abc import Sequence
from pathlib import Path


def connected(path: Path | str) -> socket.socket:
    """Return a connection that has sent nothing yet."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        caller.settimeout(30)
        caller.connect(str(path))
    except BaseException:
        caller.close()
        raise
    return caller


def send_descriptors(caller: socket.socket, data: bytes, fds: Sequence[int], seconds: float = 30) -> bool:
    """Send as soon as the kernel allows it; return False if the daemon has closed or refused before."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
    deadline = time.monotonic() + seconds
    while True:
        try:
            caller.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            return True
        except PermissionError:  # Linux 6.16 and later, while the daemon has not admitted the caller
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        except OSError:
            return False
