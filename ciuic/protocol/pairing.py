"""Requests by which a trainer pairs its snapshot with a snapshot of the files of the same instant.

The daemon listens on `pair.sock` in its runtime directory, which every user may open; it decides by the kernel's credentials of
the caller what it does for whom. Each connection carries one question and one answer, one message each (SOCK_SEQPACKET,
MessagePack).

Guarantees of a pair: the snapshot of the files shows an instant at or after the training's step boundary. Everything that had
been written (in the sense of write(2)) at the boundary is in it; what the training wrote between the two instants may be. Both
snapshots record both instants. Asking never waits, neither for a daemon nor for its answer (`ask`); the answer may be read in
another process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from ciuic.errors import BY_EXIT_CODE, Busy, CiuicError, NotPermitted, Unreachable, UsageError
from ciuic.protocol.runtime_dir import runtime_dir
from ciuic.system.poll import readable, receive_answer

# A socket of its own: a user of the control socket can mount and stop, and is an administrator. Here every user can do one thing only.
SOCKET_NAME: Final = "pair.sock"
MAX_MESSAGE_BYTES: Final = 32 << 10
MAX_IDS: Final = 1000
PAIRED: Final = "paired"
"""Tag of both snapshots of a pair: `list` looks for pairs where it is set, and retention may keep tagged snapshots."""
CUT_SECONDS: Final = 5.0
"""Longest time between the step boundary and the cut; no cut is made for a later instant."""
# A second more than `CUT_SECONDS`, so that the daemon's refusal of a cut that took too long still arrives.
ANSWER_SECONDS: Final = 6.0
"""Longest time between the question and its answer."""


class Cut(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Request for a snapshot of the files as they are now, to be paired with a training snapshot."""

    # Chosen by the trainer before it saves, so that the snapshot of the files can name a snapshot that does not exist yet.
    training: str
    """Id that the training snapshot is going to have."""
    repository: str
    """Path of the repository of the training snapshot."""
    time_ns: int
    """Wall-clock time of the step boundary."""
    message: str = ""
    roots: tuple[str, ...] = ()
    """Roots, or directories in them; empty: all roots that the caller may have snapshots of."""
    hold_reason: str = ""
    """Reason for which the snapshot is held; empty: it is not held."""


class Known(msgspec.Struct, tag=True, frozen=True):
    """Question about the states of snapshots in the daemon's repository."""

    ids: tuple[str, ...]


class Taken(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Answer to `Cut`: the instant is fixed, and the snapshot will be committed or reported as failed."""

    id: str
    repository: str
    time_ns: int
    roots: tuple[str, ...]
    note: str = ""
    """Remark for the training's log."""


class PairRefused(msgspec.Struct, tag="Refused", frozen=True):
    """Answer to a question that the daemon refuses."""

    reason: str
    hint: str = ""
    code: int = 1
    """Exit code of cli.md."""


class States(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Known`."""

    states: dict[str, str]
    """SnapshotPhase of control_types, or "gone", by id."""
    repository: str = ""
    """Path of the daemon's repository."""


T = TypeVar("T")
Question = Cut | Known
Answer = Taken | PairRefused | States
_QUESTIONS: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def decode_question(data: bytes) -> Question:
    """Decode a question. UsageError."""
    return _decoded(_QUESTIONS, data)


def decode_answer(data: bytes) -> Answer:
    """Decode an answer. UsageError."""
    return _decoded(_ANSWERS, data)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    # msgspec lets two errors through as they are: for text that is not UTF-8, and for nesting without end.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"the message cannot be read: {error}", hint="check that library and daemon have the same version"
        ) from None


def pair_socket(environment: Mapping[str, str]) -> str:
    """Return the path of the socket of the daemon whose configuration is in force."""
    return f"{runtime_dir(environment)}/{SOCKET_NAME}"


def text_of(path: str | os.PathLike[str]) -> str:
    r"""Return a path as text for a message; bytes that are not UTF-8 become ``\xNN``, and the text leads to no file then."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def ask(path: str, question: Question) -> socket.socket:
    """Send a question without waiting; return the connection on which the answer will arrive.

    Raises:
        Unreachable: no daemon listens.
        NotPermitted: the socket may not be opened.
        Busy: the daemon has too many callers.
    """
    data = msgspec.msgpack.encode(question)
    if len(data) > MAX_MESSAGE_BYTES:
        raise CiuicError("the question to the daemon is too long")
    # Non-blocking, also while it connects: a training at its step boundary must not wait for a daemon whose queue is full.
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(path)
        # A daemon that refuses at once has closed its end already; its refusal can still be received.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send(data, socket.MSG_NOSIGNAL)
    except BaseException as error:
        connection.close()
        # EAGAIN: the queue of the listening socket is full (unix(7)).
        if isinstance(error, BlockingIOError):
            raise Busy("the daemon has too many callers") from None
        if isinstance(error, PermissionError):
            raise NotPermitted(f"not permitted to open {path}") from None
        if isinstance(error, OSError):
            raise Unreachable(f"no daemon answers on {path}") from None
        raise
    return connection


def answer(connection: socket.socket, seconds: float) -> Taken | States:
    """Receive the answer within ``seconds``.

    Raises:
        Unreachable: no answer arrived in time.
        CiuicError: the daemon refused, with the class of its exit code.
    """
    # The writer process reads the answer, on the connection that it was handed with the state: the training never waits for it.
    if not readable(connection.fileno(), max(0.0, seconds)):
        raise Unreachable("the daemon did not answer in time")
    try:
        data = receive_answer(connection, MAX_MESSAGE_BYTES)
        if not data:
            raise Unreachable("the daemon closed the connection without an answer")
        found = decode_answer(data)
    except OSError as error:
        raise Unreachable(f"the daemon closed the connection without an answer: {error.strerror}") from error
    if isinstance(found, PairRefused):
        raise BY_EXIT_CODE.get(found.code, CiuicError)(found.reason, hint=found.hint)
    return found


def states_of(path: str, ids: tuple[str, ...], seconds: float) -> States:
    """Ask the daemon for the states of snapshots. CiuicError."""
    with ask(path, Known(ids[:MAX_IDS])) as connection:
        found = answer(connection, seconds)
    return found if isinstance(found, States) else States({})
