"""Making a process known to the daemon, which then watches it: one message with two descriptors, and an answer.

The daemon listens on `watch.sock` in its runtime directory, for everybody: whom it takes is its own to decide, by what the kernel
says of the caller. With the message come a pidfd of the trainer, and its page (watch_page.py) if it has one; so it works out
of a container, too, where that socket was put into it. Once it has answered, the daemon needs nothing more of the caller; who keeps the
connection open learns by its end that the daemon is gone.
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

from ciuic import service_manager
from ciuic.errors import BY_EXIT_CODE, CiuicError, NotPermitted, Unreachable
from ciuic.readiness import readable, receive_answer
from ciuic.runtime_dir import runtime_dir

SOCKET_NAME: Final = "watch.sock"
MOST_BYTES: Final = 16 << 10
MOST_TEXT: Final = 400
MOST_FDS: Final = 2
_FIRST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.05
"""Between two attempts to send while the daemon decides, which takes it about a millisecond."""

Kind = Literal["library", "command", "pid", "file"]
"""Who made it known: SnapshotManager; `ciuic watch -- COMMAND`; `ciuic watch --pid`; a [[trainer]] of the configuration."""


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A trainer. ``pid`` and ``start_ticks`` as the sender sees them, for where the daemon cannot see them itself any more."""

    name: str
    where: str
    """The directory that it saves to, or was started in. With its name it says which one it is when it comes again."""
    kind: Kind
    pid: int
    start_ticks: int
    heartbeat_seconds: float = 0.0
    """Without a beat for so long it counts as hung; 0: never."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """It is watched from now on."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """It is not."""

    reason: str
    hint: str = ""
    code: int = 1
    """Exit code of cli.md."""


Answer = Welcome | Refused
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def watch_socket(environment: Mapping[str, str]) -> str:
    """Where the daemon listens whose configuration is in force."""
    return f"{runtime_dir(environment)}/{SOCKET_NAME}"


def introduce(path: str | Path, hello: Hello, fds: Sequence[int], *, seconds: float) -> socket.socket:
    """Returns the connection when the daemon has taken it on. ``fds``: pidfd and, where there is one, page.

    Unreachable when there is no daemon, or none that answers in time; NotPermitted and CiuicError when it will not.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds)
        connection.connect(os.fspath(path))
        _send(connection, msgspec.msgpack.encode(hello), fds, time.monotonic() + seconds)
        data = receive_answer(connection, MOST_BYTES)
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
        connection.settimeout(None)
        return connection
    connection.close()
    if answer is None:
        raise Unreachable(f"the daemon behind {os.fspath(path)} did not answer")
    raise BY_EXIT_CODE.get(answer.code, CiuicError)(answer.reason, hint=answer.hint)


def _send(connection: socket.socket, data: bytes, fds: Sequence[int], deadline: float) -> None:
    """Send the message as soon as the daemon takes descriptors of this caller; return unsent when it has refused the caller. OSError."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    pause_seconds = _FIRST_PAUSE_SECONDS
    while True:
        try:
            connection.sendmsg([data], [rights], socket.MSG_NOSIGNAL)
            return
        except (BrokenPipeError, ConnectionResetError):
            return  # refused and hung up on before we could send: the refusal waits to be read
        except PermissionError:
            # Linux 6.16 and later: no descriptor can be sent before the daemon has asked the kernel who calls. Nothing tells when.
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0:
                raise TimeoutError("the daemon did not say whether it takes this caller") from None
            if readable(connection.fileno(), min(pause_seconds, remaining_seconds)):
                return  # a refusal, or the end: the caller reads it
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
