"""Runtime directory: lock of the daemon, socket names, and the journal for its successor.

Everything here is on tmpfs and gone after a reboot, which is right: overlay sessions end with the boot too.

Guarantees: two daemons never share a runtime directory (flock, so a killed daemon leaves no stale lock); the
journal of pending snapshots is replaced atomically. Leaves to snapshots/requests.py what the journal means.
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
from ciuic.protocol.peer_socket import allow_descriptors
from ciuic.protocol.worker_frames import worker_socket
from ciuic.structs import decode_json
from ciuic.system.disk import Disk
from ciuic.system.processes import boot_id
from ciuic.system.unix_sockets import bind, listener_of
from ciuic.types import Pair, SetMember

# Connections that the kernel queues: a command waits where the queue is full.
_BACKLOG = 512
# Attempts to lock a file that is still at its path. One fails only where another daemon ends at this moment.
_MAX_LOCK_ATTEMPTS = 100
_AGES_NAME = "snapshot-ages.json"
_EVENTS_NAME = "snapshot-events.json"
log = structlog.get_logger(__name__)


class CutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Part of one root in a snapshot: the epoch that its cut sealed."""

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
    """Reason for the hold; empty: the message says it."""
    user: int | None = None
    """Ordinary user that asked for the snapshot, and for whom a hold is; None for administrators and the
    schedule."""
    pair: Pair | None = None
    set_member: SetMember | None = None
    scheduled: bool = False
    requested: bool = False
    """A caller asked for it, or it is the first of a root: the capture is not throttled below half."""
    attempts: int = 0
    hold_microseconds: int = 0
    capture_pid: int = 0
    left_out: dict[str, str] = {}
    """Requested roots that the snapshot will not have, with the reason."""
    capture_started_ticks: int = 0
    """Field 22 of /proc/<pid>/stat, which distinguishes the capture from a later process with the same
    pid."""


class AgeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Newest snapshot of a root, and when it was cut."""

    snapshot: str
    """Its id; empty: the root has none."""
    boot_ns: int
    """Time since boot at its cut, negative before the boot; without one: when the root was first seen so."""


class AgeRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file of ages, by root. It means nothing in another boot."""

    boot_id: str = ""
    roots: dict[str, AgeRecord] = {}


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Pending events and recent snapshots of a rule of ``[[snapshot_when]]``."""

    roots: list[str] = []
    """Roots in which something happened that no snapshot has yet."""
    cuts_by_root: dict[str, list[float]] = {}
    """Times of its snapshots of each root in the last hour, in seconds since boot."""


class EventRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file of events, by rule. It means nothing in another boot."""

    boot_id: str = ""
    rules: dict[str, EventRecord] = {}


class RuntimeDirectory:
    """The directory at `path`, created by `acquire` if missing.

    Its mode is 0755: the control socket's group must be able to enter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def acquire(self) -> None:
        """Lock the directory for this daemon.

        Raises:
            Busy: another daemon has the lock; the message names it.
            NotPermitted: the directory cannot be written.
            CiuicError: it cannot be used.
        """
        try:
            fd = self._open_locked()
        except PermissionError as error:
            raise NotPermitted(
                f"cannot write the runtime directory {self.path}: {error.strerror}",
                hint="run the daemon as root",
            ) from error
        except OSError as error:
            raise CiuicError(f"cannot use the runtime directory {self.path}: {error.strerror}") from error
        self._lock_fd = fd
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except OSError as error:  # no space; the lock is what matters, the pid is for display
            log.warning("pid_not_written", path=str(self.path), error=str(error))

    def _open_locked(self) -> int:
        """Return a descriptor of the lock file, locked. Raises Busy and OSError."""
        lock = self.path / "daemon.lock"
        for _ in range(_MAX_LOCK_ATTEMPTS):
            self._create()
            try:
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                # Also the file of an earlier version: flock(2) takes a descriptor that only reads.
                os.fchmod(fd, 0o600)
            except FileNotFoundError:
                continue  # a daemon that ended has removed the directory
            try:
                # flock, not a pid file: the kernel releases it when the daemon is killed.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            except BlockingIOError:
                is_locked = False
            except BaseException:
                os.close(fd)
                raise
            # A daemon that ended may have removed the file since it was opened: its lock excludes nobody, for
            # the next daemon makes a new file. After flock, because the file stays from then on: only the
            # owner of the lock removes it.
            if not _is_at(fd, lock):
                os.close(fd)
                continue
            if is_locked:
                return fd
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise Busy(
                f"another ciuic daemon is running here (pid {owner}, {self.path})",
                hint="ask it: ciuic status; end it: ciuic stop",
            )
        raise Busy(f"other ciuic daemons start and end here all the time ({self.path})", hint="try again")

    def _create(self) -> None:
        """Create the directory if it is missing."""
        if not self.path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            # Independent of the umask: the group of the control socket must be able to enter.
            with suppress(FileNotFoundError):  # removed by a daemon that ended
                self.path.chmod(0o755)

    def release(self, *, keep_pending: bool = False, keep_untrusted: bool = False) -> None:
        """Remove the daemon's files and unlock; remove the directory if it is empty.

        Args:
            keep_pending: leave the journal for a successor that goes on with the pending snapshots, ages and events.
            keep_untrusted: leave the list of roots whose tracking has a gap for a successor that goes on with
                their sessions. Without the list it would trust tracking that never saw what was written past
                the overlay.
        """
        if self._lock_fd < 0:
            return
        if not keep_pending:
            (self.path / "pending.json").unlink(missing_ok=True)
            (self.path / _AGES_NAME).unlink(missing_ok=True)
            (self.path / _EVENTS_NAME).unlink(missing_ok=True)
        if not keep_untrusted:
            (self.path / "untrusted.json").unlink(missing_ok=True)
        # Before the lock ends: afterwards the file may be the next daemon's.
        (self.path / "daemon.lock").unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1
        # Not empty: it holds a lingering worker's socket. Not permitted: it is systemd's RuntimeDirectory.
        with suppress(OSError):
            self.path.rmdir()

    def worker_socket(self, root: str) -> Path:
        """Return the path of the socket of a root's worker (architecture.md, section 3)."""
        return worker_socket(self.path, root)

    def worker_sockets(self) -> set[Path]:
        """Return the sockets of all workers, also of those that have ended."""
        return set(self.path.glob("worker-*.sock"))

    def write_pending(self, records: list[PendingRecord]) -> None:
        """Replace the journal. Without fsync: it has to survive the daemon, not the kernel."""
        self._replace("pending.json", msgspec.json.encode(records))

    def write_untrusted(self, roots: set[str]) -> None:
        """Replace the list of roots whose tracking may have a gap until the next committed snapshot."""
        self._replace("untrusted.json", msgspec.json.encode(sorted(roots)))

    def read_untrusted(self) -> set[str] | None:
        """Return the predecessor's list of such roots.

        Return None when it cannot be read, and then every root may have a gap.
        """
        try:
            return decode_json((self.path / "untrusted.json").read_bytes(), set[str])
        except FileNotFoundError:
            return set()
        except (OSError, msgspec.DecodeError):
            return None

    def _replace(self, name: str, content: bytes) -> None:
        # A daemon killed here leaves the old file; not durable, because the file has to survive the daemon and not the kernel.
        Disk().replace_file(self.path / name, content, durable=False)

    def write_ages(self, ages: AgeRecords) -> None:
        """Replace the record of ages of snapshots. A failure costs a successor's knowledge and nothing else."""
        try:
            self._replace(_AGES_NAME, msgspec.json.encode(ages))
        except OSError as error:
            log.warning("ages_not_written", error=str(error))

    def read_ages(self) -> AgeRecords:
        """Return the predecessor's record of ages; an empty one when there is none or it cannot be read."""
        try:
            return decode_json((self.path / _AGES_NAME).read_bytes(), AgeRecords)
        except (OSError, msgspec.DecodeError):
            return AgeRecords()

    def write_events(self, rules: dict[str, EventRecord]) -> None:
        """Replace the record of events. A failure costs a successor's knowledge and nothing else."""
        try:
            self._replace(_EVENTS_NAME, msgspec.json.encode(EventRecords(boot_id=boot_id(), rules=rules)))
        except OSError as error:
            log.warning("events_not_written", error=str(error))

    def read_events(self) -> dict[str, EventRecord]:
        """Return the predecessor's record of events, by rule; an empty one when there is none of this boot, or it cannot be read."""
        try:
            found = decode_json((self.path / _EVENTS_NAME).read_bytes(), EventRecords)
        except (OSError, msgspec.DecodeError):
            return {}
        return found.rules if found.boot_id == boot_id() else {}

    def read_pending(self) -> list[PendingRecord]:
        """Return the predecessor's pending snapshots; empty when there is no journal or it cannot be read."""
        try:
            return decode_json((self.path / "pending.json").read_bytes(), list[PendingRecord])
        except (OSError, msgspec.DecodeError):
            return []  # the epochs of an unreadable journal are aborted, and their changes captured with the next snapshot


def bind_control_socket(path: Path, group_id: int | None, stored_fd: int | None = None) -> socket.socket:
    """Return a listening socket at `path`, with mode 0600, or 0660 and `group_id`.

    Call with the runtime directory acquired.

    A socket file on which no process answers is a killed daemon's and is replaced.

    Args:
        path: path of the socket.
        group_id: group that may connect; None: root only.
        stored_fd: listener that systemd kept over a restart; it is used if it belongs to `path`, and answers
            callers that connected meanwhile.

    Raises:
        Busy: another process answers there, which must be a daemon with another runtime directory.
        CiuicError: the socket cannot be created.
    """
    listener = _stored_listener(path, stored_fd)
    if listener is None:
        if path.exists() and _is_served(path):
            raise Busy(f"another ciuic daemon answers on {path}", hint="ask it: ciuic status")
        listener = _bind(path)
    try:
        # Callers are root and the administrators' group, and have no reason to send descriptors. Refused,
        # none can block the daemon by one that does not close (ciuic.protocol.peer_socket).
        allow_descriptors(listener, allowed=False)
        # A listener from systemd's store has the mode that an earlier configuration gave it.
        permit_control_group(path, None)
        if group_id is not None:
            permit_control_group(path, group_id)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CiuicError(f"cannot make the control socket {path}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _is_at(fd: int, path: Path) -> bool:
    """Return whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _stored_listener(path: Path, fd: int | None) -> socket.socket | None:
    if fd is None:
        return None
    listener = socket.socket(fileno=fd)
    # Without its name in the file system no caller would reach it.
    if listener.family == socket.AF_UNIX and listener.getsockname() == str(path) and path.is_socket():
        return listener
    listener.close()
    return None


def _bind(path: Path) -> socket.socket:
    # Independent of the daemon's umask: permitted callers must be able to reach the socket.
    umask = os.umask(0o022)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return bind(str(path), socket.SOCK_STREAM)
    except OSError as error:
        raise CiuicError(f"cannot make the control socket {path}: {error.strerror or error}") from error
    finally:
        os.umask(umask)


def _is_served(path: Path) -> bool:
    try:
        return listener_of(str(path)) is not None
    except TimeoutError:
        return True  # a full backlog: a process listens, slowly


def permit_control_group(path: Path, group_id: int | None) -> None:
    """Let the members of this group alone, besides root, use the control socket from now on. May raise OSError.

    Args:
        path: path of the socket.
        group_id: the group; None: root only.
    """
    if group_id is None:
        # The mode first: between the calls it must not admit the daemon's own group.
        path.chmod(0o600)
        os.chown(path, -1, os.getegid())
        return
    # The group first: between the calls the mode must not admit the group of before.
    os.chown(path, -1, group_id)
    path.chmod(0o660)
