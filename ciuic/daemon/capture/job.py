"""Protocol between the daemon and a capture process. Values only.

The daemon starts `python -m ciuic.daemon.capture.process` and writes one `CaptureJob` to its standard input,
as a line of JSON, and then, as long as the capture runs, an `Urgency` in a line of its own whenever it
changes. The process answers with JSON lines on standard output: any number of `CaptureProgress`, then exactly
one `Done` or `Failed`, unless it was killed. Logs go to standard error. Byte strings are base64 in JSON
(msgspec encodes them so).

`Done` is written when the snapshot is committed, which is a moment before the process has released the
repository and ended. The exit status is 0 when it was written; otherwise the code of `Failed`.
"""

from __future__ import annotations

import msgspec

from ciuic.structs import decode_json
from ciuic.system.io_throttle import PaceState
from ciuic.system.urgency import Urgency
from ciuic.types import LeftOut, Pair, SetMember

# Exit status: the sealed epoch was given up or cannot be read exactly any more; nothing was committed, and a
# retry is useless.
EXIT_UNDO_LOST = 20
# Exit status: the snapshot does not fit, and there is no older one whose removal could make room, so that a
# retry is useless.
EXIT_NO_ROOM = 21
# Exit status: SIGTERM or SIGINT; nothing was committed.
EXIT_INTERRUPTED = 130
# Limit of a capture's data: twenty times what captures of ten million files were measured to take. Only a
# root that was made to exhaust memory reaches it.
_DEFAULT_MEMORY_LIMIT_BYTES = 4 << 30


class RootJob(msgspec.Struct, kw_only=True, frozen=True):
    """Root to capture."""

    path: bytes
    """Absolute path of the root on the host."""
    backing_fd: int = -1
    """Number, in the capture process, of an inherited descriptor of the backing directory; -1: open `path`
    (offline)."""
    undo_fd: int = -1
    """Number of an inherited descriptor of the directory with the undo log; -1: search it beside the
    backing directory."""
    session: str = ""
    epoch: int = 0
    """Sealed epoch to capture; 0: no overlay, and the directory is read as it is (offline)."""
    worker_pid: int = 0
    """Process to whose /proc/<pid>/fd the descriptor numbers in the undo log belong."""
    excludes: tuple[str, ...] = ()
    """`ciuic.excludes.effective_patterns` of this root."""
    trust_tracking: bool = True
    """False where a process may have written to the backing directory past the overlay: everything is
    compared then."""


class CaptureJob(msgspec.Struct, kw_only=True, frozen=True):
    """Snapshot to take."""

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
    """Ordinary user that it is held for; None: an administrator."""
    pair: Pair | None = None
    set_member: SetMember | None = None
    lock_wait_seconds: float = 0.0
    """Longest wait for another writer to the repository before Busy (75)."""
    io_priority: str = "idle"
    """Value idle, best-effort:N or none."""
    left_out: tuple[LeftOut, ...] = ()
    """Requested roots that cannot be captured."""
    memory_limit_bytes: int = _DEFAULT_MEMORY_LIMIT_BYTES
    """Memory limit of the process; 0: none."""
    urgency: Urgency = Urgency()
    """Deadline and share (ciuic.system.io_throttle, ciuic.system.precedence); changes follow on standard
    input."""
    runtime_dir: str = ""
    """Directory with the workers' sockets; empty: ignore how long the workers wait."""
    trust_repository: bool = False
    """True if the repository may belong to another user."""
    reserve_bytes: int = 0
    """Space on the repository's file system that stays free for others."""
    reserve_reason: str = ""
    """Origin of the reserve, for messages."""
    needed_bytes: int = 0
    """Space that an earlier attempt had used when it ran out of room: without as much, none is made again."""


class CaptureProgress(msgspec.Struct, kw_only=True, frozen=True, tag_field="event", tag="progress"):
    """Progress of the capture, about twice a second."""

    root: bytes
    entries: int
    """Names visited so far, in all roots."""
    files_read: int
    bytes_read: int
    new_bytes: int
    entries_expected: int = 0
    """Names in all; 0: not known, as in a first capture."""
    bytes_expected: int = 0
    """Bytes in all; 0: not known, as for everything but changes in parts of files."""
    pace: PaceState = PaceState()
    path: bytes = b""
    """Last directory or large file that was begun, relative to the root."""


class ReadError(msgspec.Struct, kw_only=True, frozen=True):
    """An entry that is not in the snapshot because it could not be read."""

    root: bytes
    path: bytes
    error: str


class Done(msgspec.Struct, kw_only=True, frozen=True, tag_field="event", tag="done"):
    """Message: the snapshot is committed and durable."""

    done: bool = True
    id: str
    new_bytes: int
    size_bytes: int
    files: int
    entries: int
    """Names visited."""
    files_read: int
    """Files of which at least one block was read."""
    bytes_read: int
    modes: dict[str, str]
    """Mode of each root (`path_text`): tracked, full or offline."""
    seconds: float
    commit_seconds: float = 0.0
    """Part of `seconds` that the commit took, after everything was read."""
    errors: tuple[ReadError, ...] = ()
    errors_total: int = 0
    """Number of all errors; `errors` has the first thousand, of each root the first 250."""
    left_out: tuple[LeftOut, ...] = ()
    """Roots that are not in the snapshot."""


class Failed(msgspec.Struct, kw_only=True, frozen=True, tag_field="event", tag="failed"):
    """Message: the capture failed, and nothing was committed."""

    error: str
    hint: str = ""
    code: int = 1
    """Exit status: one of ciuic.errors, EXIT_UNDO_LOST, EXIT_NO_ROOM or EXIT_INTERRUPTED."""
    root: bytes = b""
    """Root that was being read; empty: none."""
    needed_bytes: int = 0
    """Space that the attempt had used when it ran out of room, which is the least that another one needs."""


Message = CaptureProgress | Done | Failed


def encode_job(job: CaptureJob) -> bytes:
    """Return a job as one line, newline included."""
    return msgspec.json.encode(job) + b"\n"


def decode_job(data: bytes) -> CaptureJob:
    """Return a job; raise msgspec.DecodeError for anything else."""
    return decode_json(data, CaptureJob)


def encode_message(message: Message) -> bytes:
    """Return a message as one line, newline included."""
    return msgspec.json.encode(message) + b"\n"


def decode_message(line: bytes) -> Message:
    """Return a message; raise msgspec.DecodeError for anything else."""
    message: Message = decode_json(line, Message)
    return message
