"""Uploads of one training directory: where their state lies, whether a process carries them out, and what waits for them.

``SAVE_DIR/remotes/NAME`` has what the process keeps of the remote NAME: the record of what is stored there
(`ciuic.protocol.stored_remotely`), its status, its index, its log, and two files that are locked:

* ``users``, shared, by each writer process of a training that saves here;
* ``uploader``, by the process that uploads.

Guarantees: one process uploads to a remote, also where the directory is shared by hosts whose file system
locks for all of them. It ends when it has stored everything and has locked ``users`` alone. It gives up
``uploader`` before ``users``: a writer that waits for ``users`` finds ``uploader`` free then, and starts another
process.

What retention may remove (`RemotePins`): a snapshot goes only if each remote has stored it or does not want it, as the record of the
process that uploads says (`ciuic.protocol.stored_remotely`); a record that cannot be read lets none go. Two
exceptions keep the disk from filling: less than a tenth of the file system is free, or the disk was full; and
of a remote that has never stored anything only the snapshots of the last seven days are kept.

References:
    flock(2): the lock belongs to the open file, and goes with the process that opened it.
"""

from __future__ import annotations

import fcntl
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import asdict

from ciuic.errors import CiuicError
from ciuic.protocol.stored_remotely import (
    ConfiguredRemote,
    StoredRecord,
    StoredRecordDamaged,
    read_record,
    remotes_done,
)
from ciuic.repository import Repository, SnapshotInfo
from ciuic.repository.repository import UPLOADS_DIR
from ciuic.system.child_process import environment, module_command
from ciuic.system.disk import APPEND_FILE, try_lock
from ciuic.training.format.reading import read_facts
from ciuic.types import Snapshot, SnapshotId

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.remote.uploader import Labels


LOG_NAME: Final = "log"
_USERS: Final = "users"
_UPLOADER: Final = "uploader"
_MODULE: Final = "ciuic.training.remote.upload_process"
# A process of root keeps few variables of its environment (child_process.py). Credentials of stores come from
# there, and the way to them: the training's environment is the user's own.
# Keys of remotes (CIUIC_REMOTE_*) as well: of all children these alone open one.
_STORE_PREFIXES: Final = (
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "OSS_",
    "ALIBABA_CLOUD_",
    "CIUIC_REMOTE_",
    "CIUIC_SSH_",
    "SSH_",
)
_STORE_VARIABLES: Final = frozenset(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
    for name in (upper, upper.lower())
)

_started: list[subprocess.Popen[bytes]] = []
"""Processes that this one has started and that outlive what started them."""
# Fields of an order that a `RemoteConfig` has as another type.
_CONVERTED: Final = ("key_file", "keep", "interval_seconds")


class UploadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A remote as the command line of the process that uploads has it. No secret is in it."""

    name: str
    url: str
    endpoint: str | None = None
    region: str | None = None
    ssh_command: str | None = None
    ssh_program: str | None = None
    bandwidth_bytes: int | None = None
    encryption: bool = True
    key_file: str | None = None
    key_command: tuple[str, ...] = ()
    storage_class: str | None = None
    interval_seconds: int = 0
    """Least time between two snapshots that are uploaded."""
    keep: dict[str, Any] = {}

    @classmethod
    def of(cls, remote: RemoteConfig) -> UploadOrder:
        """Return the settings of a remote as the process that uploads takes them."""
        values = {name: getattr(remote, name) for name in cls.__struct_fields__ if name not in _CONVERTED}
        key_file = None if remote.key_file is None else str(remote.key_file)
        seconds = remote.schedule.interval_seconds
        return cls(**values, key_file=key_file, interval_seconds=seconds, keep=asdict(remote.keep))

    def config(self) -> RemoteConfig:
        """Return the settings as the configuration has them: the reverse of `of`."""
        # Only here: each writer process imports this module, and needs no configuration.
        from ciuic.config import RemoteConfig
        from ciuic.config.model import RemoteSchedule
        from ciuic.retention import RetentionPolicy

        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _CONVERTED}
        keep = RetentionPolicy(**{**self.keep, "keep_tags": tuple(self.keep.get("keep_tags", ()))})
        key_file = None if self.key_file is None else Path(self.key_file)
        schedule = RemoteSchedule(self.interval_seconds)
        # A training that has ended would be a host that fell silent.
        return RemoteConfig(**values, key_file=key_file, keep=keep, schedule=schedule, status_every_seconds=0)


def state_dir(save_dir: str | os.PathLike[str]) -> Path:
    """Return the directory with one directory for each remote."""
    return Path(save_dir) / UPLOADS_DIR


def store_variables() -> dict[str, str]:
    """Return the variables of this process's environment that a client of a store may need, and the keys of remotes."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_STORE_PREFIXES) or name in _STORE_VARIABLES
    }


class UploadLock:
    """Lock of a remote, one of two; held until `release` or the end of the process."""

    def __init__(self, save_dir: str, name: str, which: str) -> None:
        """Hold nothing yet."""
        self._path = f"{save_dir}/{UPLOADS_DIR}/{name}/{which}"
        self._fd = -1

    @classmethod
    def users(cls, save_dir: str, name: str) -> UploadLock:
        """Return the lock that trainings share while they save into the directory."""
        return cls(save_dir, name, _USERS)

    @classmethod
    def uploader(cls, save_dir: str, name: str) -> UploadLock:
        """Return the lock that lets one process upload to the remote."""
        return cls(save_dir, name, _UPLOADER)

    def acquire(self, *, shared: bool = False, wait: bool = False) -> bool:
        """Take the lock, or change it from shared to exclusive; return whether that was possible.

        Raises:
            OSError: The file system has no such file or no locks.
        """
        if self._fd < 0:
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
        if not wait:
            return try_lock(self._fd, shared=shared)
        fcntl.flock(self._fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Give the lock up."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Uploads:
    """Keeps a process running for each remote, from a thread of its own: no save waits for a lock or a start."""

    def __init__(
        self, save_dir: str, orders: Sequence[UploadOrder], problem: Callable[[str], None] = lambda text: None
    ) -> None:
        """Start nothing yet.

        Args:
            save_dir: Directory of the repository.
            orders: The remotes.
            problem: Told in words why nothing is uploaded; called from the thread.
        """
        self._save_dir = save_dir
        self._orders = tuple(orders)
        self._problem = problem
        self._saves: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._users: list[UploadLock] = []

    def saved(self) -> None:
        """Have the processes running: there is a new snapshot, or there may be old ones. Returns at once."""
        if not self._orders:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="uploads", daemon=True)
            self._thread.start()
        self._saves.put(True)

    def finish(self, timeout_seconds: float) -> None:
        """Wait until what `saved` asked for is done, at most so long."""
        if self._thread is not None:
            self._saves.put(False)
            self._thread.join(timeout_seconds)

    def _keep(self) -> None:
        while self._saves.get():
            try:
                self._join()
                start_missing(self._save_dir, self._orders)
            # An upload must not harm a training; the next save tries again.
            except OSError as error:
                self._problem(f"snapshots cannot be uploaded: {error.strerror or error}")

    def _join(self) -> None:
        """Keep the processes from ending before this process does."""
        for order in self._orders[len(self._users) :]:
            lock = UploadLock.users(self._save_dir, order.name)
            # Waits for a process that is ending now.
            lock.acquire(shared=True, wait=True)
            self._users.append(lock)


def start_missing(save_dir: str, orders: Iterable[UploadOrder]) -> None:
    """Start a process for each remote that has none.

    Raises:
        OSError: The file system has no locks, or no process could be started.
    """
    # poll() reaps those that have ended.
    _started[:] = [one for one in _started if one.poll() is None]
    _started.extend(_start(save_dir, order) for order in orders if not is_uploading(save_dir, order.name))


def is_uploading(save_dir: str, name: str) -> bool:
    """Return whether a process uploads to this remote.

    Raises:
        OSError: The file system has no locks.
    """
    lock = UploadLock.uploader(save_dir, name)
    try:
        return not lock.acquire(shared=True)
    finally:
        lock.release()


def record_of(save_dir: str, remote: ConfiguredRemote, repository_id: str) -> StoredRecord | None:
    """Return what is recorded of a remote; None if nothing is, or nothing that can be read."""
    try:
        record = read_record(remote.name, state_dir(save_dir))
    except StoredRecordDamaged:
        return None
    is_its = record is not None and record.repository == repository_id and record.is_of(remote)
    return record if is_its else None


def _start(save_dir: str, order: UploadOrder) -> subprocess.Popen[bytes]:
    directory = f"{save_dir}/{UPLOADS_DIR}/{order.name}"
    os.makedirs(directory, mode=0o700, exist_ok=True)
    # A file, no pipe or terminal of the training: the process outlives it, and who reads its output to the end
    # must not wait for the upload. Appended to, because another process may be running already.
    log = os.open(f"{directory}/{LOG_NAME}", APPEND_FILE, 0o600)
    try:
        return subprocess.Popen(
            module_command(_MODULE, save_dir, msgspec.json.encode(order).decode()),
            env={**environment(of_trainer=True), **store_variables()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # As the writer process: what ends the trainer's process group must not end the upload.
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(log)


MIN_FREE_SHARE: Final = 0.1
"""Free share of the file system below which nothing is kept for a remote."""
FORGOTTEN_AFTER_NS: Final = 7 * 86400 * 10**9
"""Age from which snapshots are not kept for a remote that has never stored any, as ciuic.retention has it."""


def free_share(directory: str) -> float:
    """Return the share of the file system that this user may still fill; 1.0 where that is unknown."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return 1.0
    return found.f_bavail / found.f_blocks if found.f_blocks else 1.0


class RemotePins:
    """Snapshots that the remotes of one training still need."""

    def __init__(
        self,
        repository: str,
        remotes: Sequence[ConfiguredRemote],
        free_share: Callable[[str], float] = free_share,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Take the path of the repository and the remotes."""
        self._repository = repository
        self._remotes = tuple(remotes)
        self._free_share = free_share
        self._now_ns = now_ns
        self.off = False
        """True while the disk is full."""

    def removable(
        self, known: Sequence[SnapshotInfo], drop: Sequence[SnapshotId], repository_id: str
    ) -> tuple[list[SnapshotId], set[SnapshotId]]:
        """Return those of ``drop`` that may go, and which of these a remote would still have needed.

        Args:
            known: All snapshots of the training.
            drop: Those that no rule keeps, oldest first.
            repository_id: Id of the repository.
        """
        if not self._remotes or not drop:
            return list(drop), set()
        now_ns = self._now_ns()
        done = remotes_done(
            self._remotes, repository_id, now_ns=now_ns, state_dir=state_dir(self._repository)
        ).done
        times = {info.id: info.time_ns for info in known}
        since_ns = now_ns - FORGOTTEN_AFTER_NS
        needed = {
            id_
            for id_ in drop
            if any(times[id_] >= since_ns if ids is None else id_ not in ids for ids in done.values())
        }
        if self.off or self._free_share(self._repository) < MIN_FREE_SHARE:
            return list(drop), needed
        return [id_ for id_ in drop if id_ not in needed], set()


def labels_of(repository: Repository, snapshot: Snapshot) -> Labels:
    """Return name, epoch and step of a training state; no labels for a snapshot of files."""
    from ciuic.remote.uploader import Labels

    if not snapshot.is_state or not snapshot.roots:
        return Labels()
    job = os.fsdecode(snapshot.roots[0].path).strip("/")
    try:
        facts = read_facts(repository, snapshot.id)
    # The upload itself finds out what cannot be read.
    except (CiuicError, ValueError):
        return Labels(job)
    return Labels(job, _count(facts.epoch), _count(facts.step))


def _count(value: int | None) -> int | None:
    # Some trainings count from -1, which the name of a manifest does not have.
    return value if value is not None and value >= 0 else None
