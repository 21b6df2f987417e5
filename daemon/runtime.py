"""The runtime directory: one daemon at a time, socket names, and what a successor must know of a killed daemon.

Everything here lies on tmpfs and is gone after a reboot, which is right: overlay sessions end with the boot too.

Guarantees: two daemons never share a runtime directory (flock, so a killed daemon leaves no stale lock); the journal of
pending snapshots is replaced atomically. Leaves to others: what the journal means (snapshots.py).
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from ciuic.errors import Busy, CiuicError, NotPermitted
from ciuic.peer_socket import allow_descriptors
from ciuic.types import Pair
from ciuic.worker_sockets import worker_socket

_BACKLOG = 512
"""Connections that the kernel keeps for us: a command that finds the queue full takes the daemon for absent."""
log = structlog.get_logger(__name__)


class CutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One root's part in a snapshot: the epoch that its cut sealed."""

    path: str
    session: str
    epoch: int


class PendingRecord(msgspec.Struct, kw_only=True):
    """A snapshot that was cut and whose id was given out, but which is not committed yet."""

    id: str
    time_ns: int
    cuts: list[CutRecord]
    message: str = ""
    tags: list[str] = []
    hold: bool = False
    hold_reason: str = ""
    """Empty: the message says it."""
    user: int | None = None
    """The ordinary user that asked for it, and for whom it is held where it is."""
    pair: Pair | None = None
    scheduled: bool = False
    requested: bool = False
    """Somebody asked for it, or it is the first of a root: it is not throttled below half."""
    attempts: int = 0
    hold_microseconds: int = 0
    capture_pid: int = 0
    left_out: dict[str, str] = {}
    """Roots that it was to have and will not have, with the reason."""
    retaken: str = ""
    """Why its roots were cut once more, at a later instant than the one that was promised; empty where they were not."""
    promised_ns: int = 0
    """Wall clock of the first cut where they were; 0 where they were not."""
    capture_started_ticks: int = 0
    """Field 22 of /proc/<pid>/stat: tells the capture from a later process with its number."""


class RuntimeDirectory:
    """``path``, locked. Made if missing (0755: the control socket's group must be able to enter)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def acquire(self) -> None:
        """Becomes the one daemon here; Busy, naming the other, if there is one."""
        try:
            if not self.path.exists():
                self.path.mkdir(parents=True)
                self.path.chmod(
                    0o755
                )  # whatever our umask: the group of the control socket must be able to enter
            fd = os.open(
                self.path / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
        except PermissionError as error:
            raise NotPermitted(
                f"cannot write the runtime directory {self.path}: {error.strerror}",
                hint="run the daemon as root",
            ) from error
        except OSError as error:
            raise CiuicError(f"cannot use the runtime directory {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise Busy(
                f"another ciuic daemon is running here (pid {owner}, {self.path})",
                hint="ask it: ciuic status; end it: ciuic stop",
            ) from error
        self._lock_fd = fd
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except OSError as error:  # no space: the lock is what counts, the pid is for people
            log.warning("pid_not_written", path=str(self.path), error=str(error))

    def release(self, *, keep_pending: bool = False) -> None:
        """Leaves nothing of ours behind; the directory itself goes if it is empty. ``keep_pending``: a successor goes on with
        the snapshots that wait."""
        if self._lock_fd < 0:
            return
        if not keep_pending:
            (self.path / "pending.json").unlink(missing_ok=True)
        (self.path / "untrusted.json").unlink(missing_ok=True)
        (self.path / "daemon.lock").unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1
        # Not empty: it holds a lingering worker's socket. Not permitted: it is systemd's RuntimeDirectory.
        with suppress(OSError):
            self.path.rmdir()

    def worker_socket(self, root: str) -> Path:
        """Where the worker of ``root`` listens (architecture.md, section 3)."""
        return worker_socket(self.path, root)

    def write_pending(self, records: list[PendingRecord]) -> None:
        """Replaces the journal. No fsync: it need not survive the kernel, only the daemon."""
        self._replace("pending.json", msgspec.json.encode(records))

    def write_untrusted(self, roots: set[str]) -> None:
        """Replaces the list of roots whose tracking may have a gap until the next committed snapshot."""
        self._replace("untrusted.json", msgspec.json.encode(sorted(roots)))

    def read_untrusted(self) -> set[str] | None:
        """What the predecessor had not settled; None when it cannot be read, and then no root is known to be settled."""
        try:
            return msgspec.json.decode((self.path / "untrusted.json").read_bytes(), type=set[str])
        except FileNotFoundError:
            return set()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.path / f"{name}.tmp"
        temporary.unlink(missing_ok=True)
        with open(
            temporary, "xb", opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, 0o600)
        ) as file:
            file.write(content)
        temporary.rename(self.path / name)

    def read_pending(self) -> list[PendingRecord]:
        """What the predecessor had not finished; empty when there is nothing or it cannot be read."""
        try:
            return msgspec.json.decode((self.path / "pending.json").read_bytes(), type=list[PendingRecord])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []  # an unreadable journal only means that those epochs are given up and captured with the next


def bind_control_socket(path: Path, group_id: int | None, stored_fd: int | None = None) -> socket.socket:
    """A listening socket at ``path``: 0600, or 0660 and ``group_id``. Call with the runtime directory acquired.

    ``stored_fd``, a listener that systemd kept for us over a restart, is used if it is this path's: whoever connected
    meanwhile is answered then. A socket file that nobody answers on is a killed daemon's and is replaced; Busy when
    somebody answers, who must be a daemon with another runtime directory.
    """
    listener = _stored_listener(path, stored_fd)
    if listener is None:
        if path.exists() and _answers(path):
            raise Busy(f"another ciuic daemon answers on {path}", hint="ask it: ciuic status")
        listener = _bind(path)
    try:
        # Its callers are root and the administrators' group, and send no descriptors: none can block us by one (ciuic.peer_socket).
        allow_descriptors(listener, allowed=False)
        path.chmod(0o600)
        if group_id is not None:
            permit_control_group(path, group_id)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CiuicError(f"cannot make the control socket {path}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _stored_listener(path: Path, fd: int | None) -> socket.socket | None:
    if fd is None:
        return None
    listener = socket.socket(fileno=fd)
    if listener.family == socket.AF_UNIX and listener.getsockname() == str(path) and path.is_socket():
        return listener
    listener.close()
    return None


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    umask = os.umask(0o022)  # whatever ours: those who may use the socket must reach it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.umask(0o177)  # the mode is in force from the first moment of the name
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise CiuicError(f"cannot make the control socket {path}: {error.strerror or error}") from error
    finally:
        os.umask(umask)
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (TimeoutError, BlockingIOError):
            return True  # a full backlog: somebody listens, slowly
    return True


def permit_control_group(path: Path, group_id: int) -> None:
    """Let the members of a group use the control socket from now on. OSError."""
    os.chown(path, -1, group_id)
    path.chmod(0o660)
