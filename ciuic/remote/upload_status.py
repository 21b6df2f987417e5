"""Status of an upload for people: a record of `ciuic.repository.record_files` at ``<state directory>/<name of the remote>/status``.

It may be old, and the process that wrote it dead; nothing is decided by it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ciuic.remote.objects.wrappers import CountingObjects
from ciuic.remote.upload_deadline import (
    UploadForecast,
)
from ciuic.remote.uploader import (
    UploadedSnapshot,
)
from ciuic.repository.record_files import read_note, write_note


class Waiting(NamedTuple):
    """Snapshots of a repository that a remote lacks."""

    snapshots: int
    size_bytes: int
    """Bytes by which these snapshots let the packs grow."""
    oldest_ns: int
    """Cut of the oldest of them; 0 for none."""


_STATUS_NAME: Final = "status"
# A person looks once a second at most.
_INTERVAL_SECONDS: Final = 1.0
# Time over which the rate is measured.
_RATE_SECONDS: Final = 10.0


class UploadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of an upload at ``time_ns``."""

    time_ns: int
    pid: int
    snapshots: int = 0
    """Snapshots that the remote lacks."""
    size_bytes: int = 0
    """Bytes by which these let the packs of the repository grow: about what is to be sent."""
    oldest_ns: int = 0
    """Cut of the oldest of them; 0: the remote lacks none."""
    waits_for: str = ""
    """Why nothing is sent, in words; empty while all is well."""
    bytes_per_second: float = 0.0
    """Rate over the last ten seconds."""
    last_snapshot: str = ""
    """Snapshot that was committed last by this process."""
    last_seconds: float = 0.0
    """Time that its upload took."""
    requests: dict[str, int] = {}
    """Requests of this process by kind."""
    sent_bytes: int = 0
    received_bytes: int = 0
    remote_id: str = ""
    """Id of the remote, once it was opened."""
    other_writers: int = 0
    """Logs of other hosts, or of lost states of this one, that commit snapshots of this repository."""
    forecast: UploadForecast | None = None
    """What the remote will have when this machine ends; None: no end is known."""

    @property
    def runs(self) -> bool:
        """True if there is a process of this number: the one that wrote, unless it ended and another has its number."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return True
        except (ProcessLookupError, OverflowError):
            return False
        return self.pid > 0


def read_status(name: str, state_dir: Path) -> UploadStatus | None:
    """Return the status of the remote ``name``; None if there is none."""
    return read_note(str(state_dir / name), _STATUS_NAME, UploadStatus)


class StatusWriter:
    """Keeps the status of one remote; may be told from any thread."""

    def __init__(
        self,
        name: str,
        state_dir: Path,
        pid: int,
        *,
        tell: Callable[[str, str], None] = lambda name, text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts; ``tell`` is told of this remote what `problem` notes."""
        self._tell = functools.partial(tell, name)
        self._directory = str(state_dir / name)
        self._objects: CountingObjects | None = None
        self._pid = pid
        self._clock = clock
        self._lock = threading.Lock()
        self._written = -_INTERVAL_SECONDS
        # Until the remote was opened, what the process before knew of it.
        before = read_status(name, state_dir)
        self._waiting = (
            Waiting(0, 0, 0)
            if before is None
            else Waiting(before.snapshots, before.size_bytes, before.oldest_ns)
        )
        self._remote_id = "" if before is None else before.remote_id
        self._other_writers = 0 if before is None else before.other_writers
        self._waits_for = ""
        self._unreadable = ""
        self._forecast: UploadForecast | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called when something changed that other hosts may want to know."""
        self._last: UploadedSnapshot | None = None
        self._marks = [(clock(), 0)]

    def counts(self, objects: CountingObjects) -> None:
        """Take the requests of this process from its store, which may have been away when it began."""
        self._objects = objects

    def opened(self, remote_id: str) -> None:
        """Note that the remote was opened."""
        self._remote_id = remote_id

    def other_writers(self, number: int) -> None:
        """Note how many other logs commit snapshots of this repository."""
        self._other_writers = number

    @property
    def error(self) -> str:
        """Description of what delays the upload or could not be read; empty while all is well."""
        return self._waits_for or self._unreadable

    def waiting(self, waiting: Waiting) -> None:
        """Note what the remote lacks."""
        self._waiting = waiting
        self.write()
        self.changed()

    def problem(self, text: str) -> None:
        """Note what is waited for; an empty text: nothing."""
        self._waits_for = text
        self.write()
        self._tell(text)
        self.changed()

    def failed(self, text: str) -> None:
        """Note what ended the upload, or stops it until it is tried again."""
        self._waits_for = text
        self.write()
        self.changed()

    def forecast(self, forecast: UploadForecast | None) -> None:
        """Note what the remote will have at a deadline."""
        self._forecast = forecast
        self.write()

    def unreadable(self, text: str) -> None:
        """Note which snapshot could not be read here; an empty text: none."""
        self._unreadable = text
        self.changed()

    def uploaded(self, snapshot: UploadedSnapshot) -> None:
        """Note a commit."""
        self._last = snapshot
        self.write()

    def step(self) -> None:
        """Write the status if the last one is a second old."""
        if self._clock() - self._written >= _INTERVAL_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the status now. What cannot be written is left out: the upload goes on."""
        with self._lock:
            self._written = self._clock()
            counts = {} if self._objects is None else self._objects.counts()
            sent = sum(count.sent_bytes for count in counts.values())
            self._marks = [mark for mark in self._marks if self._written - mark[0] <= _RATE_SECONDS] or [
                self._marks[-1]
            ]
            self._marks.append((self._written, sent))
            began, before = self._marks[0]
            status = UploadStatus(
                time_ns=time.time_ns(),
                pid=self._pid,
                snapshots=self._waiting.snapshots,
                size_bytes=self._waiting.size_bytes,
                oldest_ns=self._waiting.oldest_ns,
                waits_for=self._waits_for,
                bytes_per_second=(sent - before) / max(self._written - began, 0.001),
                last_snapshot=str(self._last.id) if self._last else "",
                last_seconds=self._last.seconds if self._last else 0.0,
                requests={kind: count.requests for kind, count in counts.items() if count.requests},
                sent_bytes=sent,
                received_bytes=sum(count.received_bytes for count in counts.values()),
                remote_id=self._remote_id,
                other_writers=self._other_writers,
                forecast=self._forecast,
            )
            try:
                write_note(self._directory, _STATUS_NAME, status, durable=False)
            except OSError:
                return
