"""What a trainer and its commands ask the daemon, so that a training's snapshot and one of the files of the same instant belong together.

The daemon listens on `pair.sock` in its runtime directory, for everybody; whom it does what for is its own to decide, by what the kernel
says of the caller. One question and one answer a connection, one message each (SOCK_SEQPACKET, MessagePack).

Guarantees of a pair: the files are those of an instant at or after the training's step boundary. Everything that had been written (in
the sense of write(2)) when the boundary came is in them; what the training wrote in the time between the two may be. Both instants are
kept with both halves. Asking never waits: not for a daemon, not for its answer (`ask`), which may be read in another process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from ciuic.errors import BY_EXIT_CODE, Busy, CiuicError, NotPermitted, Unreachable, UsageError
from ciuic.readiness import readable, receive_answer
from ciuic.runtime_dir import runtime_dir

SOCKET_NAME: Final = "pair.sock"
MOST_BYTES: Final = 32 << 10
MOST_IDS: Final = 1000
PAIRED: Final = "paired"
"""The tag of both halves: `list` looks for pairs where it is, and retention may keep what has it."""
CUT_SECONDS: Final = 5.0
"""The files of a later instant are not asked for any more."""
ANSWER_SECONDS: Final = 6.0
"""After asking, an answer has come by then, or does not come."""


class Cut(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A snapshot of the files as they are now is wanted for one of a training's state."""

    training: str
    """The id that the training's snapshot is going to have."""
    repository: str
    """Where that will be."""
    time_ns: int
    """When its state was whole."""
    message: str = ""
    roots: tuple[str, ...] = ()
    """Or directories in them; empty: all that the caller may have snapshots of."""
    hold_reason: str = ""
    """Not empty: it is held."""


class Known(msgspec.Struct, tag=True, frozen=True):
    """What has become of snapshots of the daemon's repository?"""

    ids: tuple[str, ...]


class Taken(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The instant is fixed, and the snapshot will be committed or reported as failed."""

    id: str
    repository: str
    time_ns: int
    roots: tuple[str, ...]
    note: str = ""
    """Something that the training's log should have."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """There will be no such snapshot."""

    reason: str
    hint: str = ""
    code: int = 1
    """Exit code of cli.md."""


class States(msgspec.Struct, tag=True, frozen=True):
    """By id: a phase of control_types, or "gone"."""

    states: dict[str, str]
    repository: str = ""
    """The daemon's."""


T = TypeVar("T")
Question = Cut | Known
Answer = Taken | Refused | States
_QUESTIONS: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def decode_question(data: bytes) -> Question:
    """UsageError."""
    return _decoded(_QUESTIONS, data)


def decode_answer(data: bytes) -> Answer:
    """UsageError."""
    return _decoded(_ANSWERS, data)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"the message cannot be read: {error}", hint="are library and daemon of different versions?"
        ) from None


def pair_socket(environment: Mapping[str, str]) -> str:
    """Where the daemon listens whose configuration is in force."""
    return f"{runtime_dir(environment)}/{SOCKET_NAME}"


def text_of(path: str | os.PathLike[str]) -> str:
    """A path as a message can carry it: bytes that are no UTF-8 as \\xNN, by which nobody will find it."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def ask(path: str, question: Question) -> socket.socket:
    """The connection that the answer will come over. Waits for nothing. Unreachable; NotPermitted; Busy."""
    data = msgspec.msgpack.encode(question)
    if len(data) > MOST_BYTES:
        raise CiuicError("too much is asked of the daemon at once")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(path)
        with suppress(BrokenPipeError, ConnectionResetError):  # refused at once: the refusal waits to be read
            connection.send(data, socket.MSG_NOSIGNAL)
    except BaseException as error:
        connection.close()
        if isinstance(error, BlockingIOError):
            raise Busy("the daemon has too many callers") from None
        if isinstance(error, PermissionError):
            raise NotPermitted(f"not permitted to open {path}") from None
        if isinstance(error, OSError):
            raise Unreachable(f"no daemon answers on {path}") from None
        raise
    return connection


def answer(connection: socket.socket, seconds: float) -> Taken | States:
    """What the daemon says, if it does so in time. Unreachable, or what it refuses with: CiuicError."""
    if not readable(connection.fileno(), max(0.0, seconds)):
        raise Unreachable("the daemon has not answered")
    try:
        data = receive_answer(connection, MOST_BYTES)
        if not data:
            raise Unreachable("the daemon went away before it answered")
        found = decode_answer(data)
    except OSError as error:
        raise Unreachable(f"the daemon went away before it answered: {error.strerror}") from error
    if isinstance(found, Refused):
        raise BY_EXIT_CODE.get(found.code, CiuicError)(found.reason, hint=found.hint)
    return found


def states_of(path: str, ids: tuple[str, ...], seconds: float) -> States:
    """What the daemon knows of these. CiuicError."""
    with ask(path, Known(ids[:MOST_IDS])) as connection:
        found = answer(connection, seconds)
    return found if isinstance(found, States) else States({})
