"""Pairs of snapshots: a trainer asks for a snapshot of the files of the same instant as its own, and looks up how both ended.

The daemon listens on `pair.sock` in its runtime directory, which every user may open; it decides by the kernel's credentials of
the caller what it does for whom. Each connection carries one question and one answer, one message each (SOCK_SEQPACKET,
MessagePack).

Guarantees of a pair: the snapshot of the files shows an instant at or after the training's step boundary. Everything that had
been written (in the sense of write(2)) at the boundary is in it; what the training wrote between the two instants may be. Both
snapshots record both instants. Asking never waits, neither for a daemon nor for its answer (`ask`); the answer may be read in
another process.

Guarantees of a lookup: states are looked up now, not cached. Only directories are opened, and no lookup takes longer than
`LOOK_SECONDS`, whatever file system the other repository is on (its path comes from the trainer). A state that cannot be found
is "unknown".
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ciuic.errors import Busy, CiuicError, NotPermitted, Unreachable, UsageError
from ciuic.printable import path_text
from ciuic.protocol.peer_socket import Refused, runtime_dir
from ciuic.structs import decode_msgpack
from ciuic.system.poll import readable, receive_queued
from ciuic.types import Pair

# A socket of its own: a user of the control socket can mount and stop, and is an administrator. Here every user can do one thing only.
SOCKET_NAME: Final = "pair.sock"
MAX_MESSAGE_BYTES: Final = 32 << 10
MAX_IDS: Final = 1000
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


class Files(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Request for a snapshot of the files of a job as they are now, which belongs to no training snapshot."""

    roots: tuple[str, ...]
    """Roots, or directories in them."""
    message: str = ""
    tags: tuple[str, ...] = ()
    """Tags of a job (`ciuic.system.slurm.job_tags`), and no others: retention may keep tagged snapshots."""


class Known(msgspec.Struct, tag=True, frozen=True):
    """Question about the states of snapshots in the daemon's repository."""

    ids: tuple[str, ...]


class Taken(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Answer to `Cut` and `Files`: the instant is fixed, and the snapshot will be committed or reported as failed."""

    id: str
    repository: str
    time_ns: int
    roots: tuple[str, ...]
    note: str = ""
    """Remark for the training's log."""


class States(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Known`."""

    states: dict[str, str]
    """SnapshotPhase of control_types, or "gone", by id."""
    repository: str = ""
    """Path of the daemon's repository."""


Question = Cut | Files | Known
Answer = Taken | Refused | States


def decode_question(data: bytes) -> Question:
    """Decode a question. UsageError."""
    question: Question = _decoded(data, Question)
    return question


def decode_answer(data: bytes) -> Answer:
    """Decode an answer. UsageError."""
    answer: Answer = _decoded(data, Answer)
    return answer


def _decoded(data: bytes, type_: Any) -> Any:
    try:
        return decode_msgpack(data, type_)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"the message cannot be read: {error}", hint="check that library and daemon have the same version"
        ) from None


def pair_socket(environment: Mapping[str, str]) -> str:
    """Return the path of the socket of the daemon whose configuration is in force."""
    return f"{runtime_dir(environment)}/{SOCKET_NAME}"


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
        data = receive_queued(lambda: connection.recv(MAX_MESSAGE_BYTES))
        if not data:
            raise Unreachable("the daemon closed the connection without an answer")
        found = decode_answer(data)
    except OSError as error:
        raise Unreachable(f"the daemon closed the connection without an answer: {error.strerror}") from error
    if isinstance(found, Refused):
        raise found.raised()
    return found


def states_of(path: str, ids: tuple[str, ...], seconds: float) -> States:
    """Ask the daemon for the states of snapshots. CiuicError."""
    with ask(path, Known(ids[:MAX_IDS])) as connection:
        found = answer(connection, seconds)
    return found if isinstance(found, States) else States({})


State = Literal["committed", "pending", "failed", "gone", "unknown"]
LOOK_SECONDS: Final = 1.0
_PHASES: Final[dict[str, State]] = {
    "committed": "committed",
    "pending": "pending",
    "capturing": "pending",
    "failed": "failed",
    "gone": "gone",
}


def states(
    pairs: Iterable[Pair], repository: str | Path, names: Iterable[str], socket: str
) -> Mapping[str, State]:
    """Return the state of each paired snapshot by its id.

    Args:
        pairs: the pairs as the snapshots of one repository record them.
        repository: path of that repository.
        names: ids of the snapshots that it has.
        socket: path of the socket on which a daemon may be asked.
    """
    wanted: dict[str, set[str]] = {}
    files: set[str] = set()
    for pair in pairs:
        if pair.id:
            wanted.setdefault(pair.repository, set()).add(pair.id)
            # The daemon takes snapshots of files only; states of trainings are not its own.
            if pair.of == "filesystem":
                files.add(pair.id)
    found: dict[str, State] = {}
    own = path_text(os.path.realpath(repository))
    for path, ids in wanted.items():
        # Each repository is listed once, however many pairs it has.
        there = set(names) if path == own else _names(path)
        if there is not None:
            found.update((id_, "committed" if id_ in there else "gone") for id_ in ids)
    # The daemon is asked about missing snapshots too: they may still be pending.
    open_ = tuple(sorted(id_ for id_ in files if found.get(id_) != "committed"))[:MAX_IDS]
    if open_:
        said = _said(socket, open_)
        for id_ in open_:
            # The daemon's word counts for its own repository only: another one may have the same ids.
            if id_ in wanted.get(said.repository, ()):
                found[id_] = _PHASES.get(said.states.get(id_, ""), "unknown")
    return {id_: found.get(id_, "unknown") for ids in wanted.values() for id_ in ids}


def _said(socket: str, ids: tuple[str, ...]) -> States:
    try:
        return states_of(socket, ids, LOOK_SECONDS)
    except CiuicError:
        return States({})


def _names(repository: str) -> set[str] | None:
    """Return the ids of a repository's snapshots; None if they cannot be read within `LOOK_SECONDS`."""
    # In a thread that is abandoned when the time is over: listing a directory on another user's FUSE mount may hang.
    found: list[set[str]] = []

    def look() -> None:
        try:
            # The names are enough: nothing in the repository of another user is decoded.
            found.append(set(os.listdir(f"{repository}/snapshots")))
        except OSError:
            return

    # A daemon thread, so that a look that hangs does not keep the process from ending.
    looking = threading.Thread(target=look, name="ciuic-pair-status", daemon=True)
    looking.start()
    looking.join(LOOK_SECONDS)
    return found[0] if found else None
