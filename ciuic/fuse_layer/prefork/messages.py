"""The protocol of forking processes: JSON requests and answers, one a packet, with descriptors beside them.

Requests: a list of arguments, with the descriptors of the new process → its process number, 0 where none can
be forked; a process number → its exit status as of Popen, null while it lives; a map → a request to the
keeper (keeper.py), true or false.

Guarantees: no descriptor of a request that is not understood stays open here; a caller that has hung up gets
no process.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from ciuic.system import unix_sockets

FIRST_PASSED_FD: Final = 100
"""Number of the first descriptor that a forked process was given; the others follow in order."""
MESSAGE_BYTES: Final = 65536
"""Size of the largest request or answer."""
MAX_FDS: Final = 250
"""Limit of descriptors in one request; SCM_MAX_FD of the kernel is 253."""
UNKNOWN_STATUS: Final = 255
"""Exit status of a process that is not a child, or was collected elsewhere."""
WORKER: Final = "ciuic.fuse_layer.worker"
KEEPER_PREFIX: Final = "keeper-"
"""Prefix of a keeper's socket in the runtime directory."""
log = structlog.get_logger(__name__)


class ForkedChild(NamedTuple):
    """Request that a newly forked process has to carry out: arguments of its program, and its descriptors."""

    arguments: list[str]
    fds: list[int]


# Of daemons, of which one comes at a time.
_BACKLOG: Final = 128


def listen_for_daemons(directory: Path) -> socket.socket:
    """Return a listening socket of a new name in ``directory``, for the daemon that comes after this one.

    Raises:
        OSError: there is no room for it, or no descriptor.
    """
    path = directory / f"{KEEPER_PREFIX}{secrets.token_hex(4)}.sock"
    return unix_sockets.bind(str(path), socket.SOCK_SEQPACKET, backlog=_BACKLOG)


def receive(connection: socket.socket) -> tuple[list[str] | int | dict[str, Any] | None, list[int]]:
    """Return a request, None at the end of the connection, and its descriptors.

    Raises:
        OSError: the connection has failed.
        ValueError: the request is no JSON. Its descriptors are closed.
    """
    message, fds, _ = unix_sockets.receive(connection, MESSAGE_BYTES, MAX_FDS)
    try:
        return (json.loads(message) if message else None), fds
    except ValueError:
        # An open descriptor of a session would let its mount hang, instead of answering ENOTCONN.
        for fd in fds:
            os.close(fd)
        raise


def send(connection: socket.socket, content: object, fds: Sequence[int] = ()) -> None:
    """Send a request or an answer. OSError."""
    connection.sendmsg([json.dumps(content).encode()], unix_sockets.rights(fds))


def answer_or_end(connection: socket.socket, pid: int) -> None:
    """Answer with the number of the process that was forked for a request, 0 for none; kill it when the caller is gone.

    Raises:
        OSError: the caller is gone.
    """
    try:
        send(connection, pid)
    except OSError:
        if pid:
            os.kill(pid, signal.SIGKILL)
        raise


def is_abandoned(connection: socket.socket) -> bool:
    """Return whether the caller has hung up: its timeout is over, and another process may have forked the worker meanwhile.

    Two workers of one session would answer the same kernel, and each would know half of what has changed.
    """
    poll = select.poll()
    # No event is asked for: POLLHUP and POLLERR are reported in any case.
    poll.register(connection, 0)
    return bool(poll.poll(0))


def fork() -> int | None:
    """Fork; return the new process's number, 0 where the system has none to give, and None in the new process."""
    try:
        return os.fork() or None
    except OSError as error:
        log.warning("process_not_forked", error=str(error))
        return 0


def collect(pid: int) -> int | None:
    """Return the exit status of a child as of Popen; None while it lives."""
    # WNOHANG, because the caller serves others while the child lives.
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return UNKNOWN_STATUS
    return os.waitstatus_to_exitcode(status) if found else None
