"""Register a process with the daemon, which then watches it: one message with two descriptors, and an answer.

The daemon listens on `watch.sock` in its runtime directory, which every user may open; it decides by the kernel's credentials of
the caller whom it accepts. The message carries a pidfd of the trainer and its heartbeat page (heartbeat_page.py), if it has one. It
therefore works from a container, too, if the socket is mounted there. After its answer the daemon needs nothing more of the caller;
a caller that keeps the connection open sees by its end that the daemon is gone.
"""

from __future__ import annotations

import array
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from ciuic.errors import BY_EXIT_CODE, CiuicError, NotPermitted, Unreachable
from ciuic.protocol.runtime_dir import runtime_dir
from ciuic.system import service_manager
from ciuic.system.poll import readable, receive_answer

SOCKET_NAME: Final = "watch.sock"
MAX_MESSAGE_BYTES: Final = 16 << 10
MAX_TEXT_CHARACTERS: Final = 400
MAX_FDS: Final = 2
# Pauses between two attempts to send while the daemon decides, which takes about a millisecond.
_FIRST_PAUSE_SECONDS: Final = 0.001
_MAX_PAUSE_SECONDS: Final = 0.05

Kind = Literal["library", "command", "pid", "file"]
"""Origin of a registration: SnapshotManager; `ciuic watch -- COMMAND`; `ciuic watch --pid`; a [[trainer]] of the configuration."""


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Registration of a trainer."""

    name: str
    where: str
    """Directory that it saves to, or was started in. Together with the name it identifies a training that is started again."""
    kind: Kind
    # The pidfd that comes with the message identifies the process; the number may belong to another one by now.
    pid: int
    """Process id as the sender sees it, for a process that has ended before the daemon looks."""
    start_ticks: int
    """Start time of the process in clock ticks, as in proc_pid_stat(5); tells it from a later one with the same pid."""
    heartbeat_seconds: float = 0.0
    """Time without a heartbeat after which it counts as hung; 0: never."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Answer: the trainer is watched from now on."""


class WatchRefused(msgspec.Struct, tag="Refused", frozen=True):
    """Answer: the trainer is not watched."""

    reason: str
    hint: str = ""
    code: int = 1
    """Exit code of cli.md."""


Answer = Welcome | WatchRefused
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def watch_socket(environment: Mapping[str, str]) -> str:
    """Return the path of the socket of the daemon whose configuration is in force."""
    return f"{runtime_dir(environment)}/{SOCKET_NAME}"


def introduce(path: str | Path, hello: Hello, fds: Sequence[int], *, seconds: float) -> socket.socket:
    """Register a trainer; return the connection to the daemon that watches it from now on.

    Args:
        path: the daemon's socket.
        hello: the message.
        fds: pidfd and, if there is one, heartbeat page.
        seconds: longest time until the answer.

    Raises:
        Unreachable: no daemon, or none that answers in time.
        NotPermitted: the socket may not be opened.
        CiuicError: the daemon refused, with the class of its exit code.
    """
    # SOCK_SEQPACKET keeps messages apart, so the descriptors arrive with their message, and no framing is needed.
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds)
        connection.connect(os.fspath(path))
        _send(connection, msgspec.msgpack.encode(hello), fds, time.monotonic() + seconds)
        data = receive_answer(connection, MAX_MESSAGE_BYTES)
        answer = _ANSWERS.decode(data) if data else None
    except PermissionError as error:
        connection.close()
        raise NotPermitted(f"not permitted to open {os.fspath(path)}") from error
    except (OSError, msgspec.DecodeError) as error:
        connection.close()
        raise Unreachable(
            f"no daemon answers on {os.fspath(path)}", hint=service_manager.start_hint()
        ) from error
    if isinstance(answer, Welcome):
        # The caller reads until the daemon's end, without a timeout.
        connection.settimeout(None)
        return connection
    connection.close()
    if answer is None:
        raise Unreachable(f"the daemon behind {os.fspath(path)} did not answer")
    raise BY_EXIT_CODE.get(answer.code, CiuicError)(answer.reason, hint=answer.hint)


def _send(connection: socket.socket, data: bytes, fds: Sequence[int], deadline: float) -> None:
    """Send the message once the daemon accepts descriptors of this caller; return without sending after a refusal. OSError."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    pause_seconds = _FIRST_PAUSE_SECONDS
    while True:
        try:
            connection.sendmsg([data], [rights], socket.MSG_NOSIGNAL)
            return
        except (BrokenPipeError, ConnectionResetError):
            # The daemon has refused and closed its end already; its refusal can still be received.
            return
        except PermissionError:
            # Linux 6.16 and later: descriptors can be sent only after the daemon has checked the caller's credentials. No event
            # reports that, so sending is retried.
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0:
                raise TimeoutError("the daemon did not accept or refuse the caller in time") from None
            # A refusal, or the end of the connection: the caller receives it.
            if readable(connection.fileno(), min(pause_seconds, remaining_seconds)):
                return
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
