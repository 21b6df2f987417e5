"""What the daemon and a capture process say to each other. Values only.

The daemon starts `python -m ciuic.daemon.capture` and writes one `CaptureJob` to its standard input, as a line of JSON, then, as long
as the capture runs, an `Urgency` in a line of its own whenever the terms under which it works change.
The process answers with JSON lines on standard output: any number of `Progress`, then exactly one `Done` or `Failed`,
unless it was killed. Logs go to standard error. Byte strings are base64 in JSON (msgspec does that by itself).

`Done` is written when the snapshot is committed, which is a moment before the process has let go of the repository and ended.
The exit status is 0 when it was written; otherwise the code of `Failed`.
"""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from ciuic.pace import PaceState
from ciuic.types import LeftOut, Pair
from ciuic.urgency import Urgency

EXIT_UNDO_LOST = 20
"""The sealed state was given up or cannot be read exactly any more; nothing was committed, and trying again is useless."""
EXIT_NO_ROOM = 21
"""The snapshot does not fit, and there is no older one whose removal could make room: trying again is useless."""
EXIT_INTERRUPTED = 130
"""SIGTERM or SIGINT; nothing was committed."""
DEFAULT_MEMORY_LIMIT_BYTES = 4 << 30
"""Of a capture's data. Twenty times what captures of ten million files were measured to take; a capture that reaches it works for
somebody who wants it to."""


class RootJob(msgspec.Struct, kw_only=True, frozen=True):
    """One root to capture."""

    path: bytes
    """Absolute path of the root on the host."""
    backing_fd: int = -1
    """Number, in the capture process, of an inherited descriptor of the backing directory. -1: open `path` (offline)."""
    undo_fd: int = -1
    """Number of an inherited descriptor of the directory with the undo log. -1: found beside the backing directory."""
    session: str = ""
    epoch: int = 0
    """The sealed epoch to capture; 0: no overlay, what is there is read as it is (offline)."""
    worker_pid: int = 0
    """Whose /proc/<pid>/fd the descriptor numbers in the undo log belong to."""
    excludes: tuple[str, ...] = ()
    """`ciuic.excludes.effective_patterns` of this root."""
    trust_tracking: bool = True
    """False where something may have written to the backing directory unseen: everything is compared then."""


class CaptureJob(msgspec.Struct, kw_only=True, frozen=True):
    """One snapshot to make."""

    repository: str
    id: str
    time_ns: int
    """Wall clock at the cut."""
    host: str
    roots: tuple[RootJob, ...]
    tags: tuple[str, ...] = ()
    message: str = ""
    hold: bool = False
    hold_reason: str = ""
    hold_uid: int | None = None
    """The ordinary user that it is held for."""
    pair: Pair | None = None
    lock_wait_seconds: float = 0.0
    """How long to wait for another writer to the repository before Busy (75)."""
    io_priority: str = "idle"
    """idle, best-effort:N or none."""
    left_out: tuple[LeftOut, ...] = ()
    """Roots that the snapshot was to have and that cannot be captured."""
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES
    """For the process; 0: none."""
    urgency: Urgency = Urgency()
    """Terms under which it works beside the job (ciuic.pace, ciuic.precedence); later ones follow on standard input."""
    runtime_dir: str = ""
    """Where the workers have their sockets; empty where nothing is to be heard of them."""
    trust_repository: bool = False
    """Whether the repository may belong to another user."""
    reserve_bytes: int = 0
    """So much stays free for others on the repository's file system."""
    reserve_reason: str = ""
    """Where the reserve comes from, for messages."""
    needed_bytes: int = 0
    """What an earlier attempt had written when it ran out of room: less is not tried again."""


class Progress(msgspec.Struct, kw_only=True, frozen=True, tag_field="event", tag="progress"):
    """Where the capture is; about twice a second."""

    root: bytes
    entries: int
    """Names looked at so far, all roots."""
    files_read: int
    bytes_read: int
    new_bytes: int
    entries_expected: int = 0
    """0 where nobody knows: a first capture."""
    bytes_expected: int = 0
    """0 where nobody knows: everything but changes in parts of files."""
    pace: PaceState = PaceState()
    path: bytes = b""
    """Relative to the root: the last directory or large file that was begun."""


class ReadError(msgspec.Struct, kw_only=True, frozen=True):
    """Something that is not in the snapshot because it could not be read."""

    root: bytes
    path: bytes
    error: str


class Done(msgspec.Struct, kw_only=True, frozen=True, tag_field="event", tag="done"):
    """The snapshot is committed and durable."""

    done: bool = True
    id: str
    new_bytes: int
    size_bytes: int
    files: int
    entries: int
    """Names looked at."""
    files_read: int
    """Files of which at least one block was read."""
    bytes_read: int
    modes: dict[str, str]
    """Root (`printable`) → tracked, full or offline."""
    seconds: float
    errors: tuple[ReadError, ...] = ()
    errors_total: int = 0
    """`errors` names the first thousand, of each root the first 250."""
    left_out: tuple[LeftOut, ...] = ()
    """Roots that are not in the snapshot."""


class Failed(msgspec.Struct, kw_only=True, frozen=True, tag_field="event", tag="failed"):
    """Nothing was committed."""

    error: str
    hint: str = ""
    code: int = 1
    """The exit status: one of ciuic.errors, EXIT_UNDO_LOST or EXIT_INTERRUPTED."""
    root: bytes = b""
    """The root that was being read; empty when none was."""
    needed_bytes: int = 0
    """What the attempt had written when room was missing: the least that another one has to find free."""


Message = Progress | Done | Failed

_encoder = msgspec.json.Encoder()
_job_decoder = msgspec.json.Decoder(CaptureJob)
_message_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


_T = TypeVar("_T")


def printable(path: str | bytes) -> str:
    """A path as text that JSON can carry: bytes that are no UTF-8 as \\xNN. For people, not for opening files."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def encode_job(job: CaptureJob) -> bytes:
    """One line, newline included."""
    return _encoder.encode(job) + b"\n"


def decode_job(data: bytes) -> CaptureJob:
    """Raises msgspec.ValidationError or DecodeError for anything else."""
    return _decode(_job_decoder, data)


def encode_message(message: Message) -> bytes:
    """One line, newline included."""
    return _encoder.encode(message) + b"\n"


def decode_message(line: bytes) -> Message:
    """Raises msgspec.ValidationError or DecodeError for anything else."""
    return _decode(_message_decoder, line)


def _decode(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # these come through it unchanged
        raise msgspec.DecodeError(str(error)) from error
