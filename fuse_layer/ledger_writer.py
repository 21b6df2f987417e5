"""Writing the ledger of a session, and reading what a predecessor wrote.

Guarantees:

* A record is in its file when ``append`` returns; about a microsecond.
* A file that is full is followed by a new one and taken into the archive in a thread of ours, a little at a time, so that
  the job does not feel it; then it is removed. Whoever takes over applies what is not in the archive yet.
* No failure in here reaches the job: a ledger that cannot be written is given up, and with it survival.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from pathlib import Path
from typing import Final

import structlog

from ciuic.fuse_layer import ledger
from ciuic.fuse_layer.ledger import Inherited
from ciuic.fuse_layer.ledger_archive import Archive

log = structlog.get_logger(__name__)

FULL_BYTES: Final = 512 << 10
"""Of files that are not in the archive: some ten thousand records, which a successor applies in some ten milliseconds."""
_MOST_FILES: Final = 16
_SLICE_PAUSE_SECONDS: Final = 0.001
_PATIENT_BYTES: Final = 3 << 20
"""Up to so much waits to be taken in, the job goes first."""
_ARCHIVE: Final = ".archive-"


class Ledger:
    """Appends to the files ``<base>.<number>``. Thread-safe; None in place of one means that nothing is written."""

    def __init__(
        self, base: Path, *, inherited: Inherited | None = None, full_bytes: int = FULL_BYTES
    ) -> None:
        self._base = base
        self._full_bytes = full_bytes
        self._lock = threading.Lock()
        self._numbers = _numbers(base)
        self._fd = -1
        self._size = sum(_path(base, number).stat().st_size for number in self._numbers)
        self._begin = b""
        archive = inherited.archive if inherited is not None else None
        self._archive_path = Path(f"{base}{_ARCHIVE}{secrets.token_hex(4)}")
        self._generation = 1
        if isinstance(archive, Archive):
            self._archive_path, self._generation = archive.path, archive.generation
        self._archive: Archive | None = None
        """Of the thread that takes files in."""
        self._absorbing = False
        self.kept = True
        """Whether a successor could go on."""

    @property
    def absorbing(self) -> bool:
        """Whether files are being taken into the archive."""
        return self._absorbing

    def begin(self, minor: int, flags: int, max_write_bytes: int) -> None:
        """Starts a new file for a session that was just negotiated, or taken over."""
        self._begin = ledger.begin_record(minor, flags, max_write_bytes)
        self._next_file()

    def _next_file(self) -> None:
        number = (self._numbers[-1] if self._numbers else 0) + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(_path(self._base, number), flags, 0o600)
        os.write(fd, self._begin)
        with self._lock:
            if not self.kept:
                os.close(fd)
                _path(self._base, number).unlink()
                return
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self._size += len(self._begin)
            self._numbers.append(number)

    def remove(self) -> None:
        """The session ends; nobody will go on with it. A second time it does nothing: another session may be there by now."""
        if not self.kept:
            return
        self.kept = False
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
        remove(self._base)

    def append(self, record: bytes) -> None:
        """Write one or several records. Never raises."""
        try:
            with self._lock:
                if self._fd < 0:
                    return
                if os.write(self._fd, record) != len(record):
                    raise OSError("a record was cut short")
                self._size += len(record)
                full = not self._absorbing and self._is_full
                if full:
                    self._absorbing = True
        except OSError as error:
            self._give_up(error)
            return
        if full:
            threading.Thread(target=self._absorb, name="ledger", daemon=True).start()

    def _give_up(self, error: Exception) -> None:
        log.error("ledger_given_up", error=str(error))
        self.remove()

    @property
    def _is_full(self) -> bool:
        return self._size > self._full_bytes or len(self._numbers) > _MOST_FILES

    # -- into the archive -----------------------------------------------------------------------------

    def _absorb(self) -> None:
        """Until what is left is short."""
        try:
            if self._archive is None:
                self._archive = Archive(self._archive_path, generation=self._generation)
            while self.kept and self._is_full:
                self._next_file()
                for number in self._numbers[:-1]:
                    self._absorb_file(self._archive, number)
        except (OSError, sqlite3.Error) as error:
            if self.kept:
                self._give_up(error)
        finally:
            self._absorbing = False

    def _absorb_file(self, archive: Archive, number: int) -> None:
        path = _path(self._base, number)
        data = path.read_bytes()
        if number > archive.absorbed:
            for _ in archive.absorb(number, data):
                if not self.kept:
                    return
                if self._size < _PATIENT_BYTES:
                    time.sleep(_SLICE_PAUSE_SECONDS)
        with self._lock:
            self._numbers.remove(number)
            self._size -= len(data)
        path.unlink(missing_ok=True)


def replay(base: Path) -> Inherited | None:
    """The tables that the ledger of ``base`` describes; None when there is none that this version understands."""
    try:
        archives = _archives(base)
        archive = Archive(archives[0]) if archives else None
        inherited = Inherited(archive)
        if archive is not None:
            archive.restore(inherited)
        for number in _numbers(base):
            if archive is not None and number <= archive.absorbed:
                continue
            for _ in inherited.apply(_path(base, number).read_bytes()):
                pass
    except sqlite3.Error as error:
        log.error("ledger_not_read", error=str(error))
        return None
    return inherited if inherited.understood else None


def remove(base: Path) -> None:
    """Removes the files of ``base``."""
    for number in _numbers(base):
        _path(base, number).unlink(missing_ok=True)
    for path in base.parent.glob("*"):
        if path.name.startswith(base.name + _ARCHIVE):
            path.unlink(missing_ok=True)


def _path(base: Path, number: int) -> Path:
    return base.with_name(f"{base.name}.{number}")


def _numbers(base: Path) -> list[int]:
    prefix = base.name + "."
    names = (entry.name[len(prefix) :] for entry in base.parent.glob("*") if entry.name.startswith(prefix))
    return sorted(int(name) for name in names if name.isdigit())


def _archives(base: Path) -> list[Path]:
    """At most one; beside it are files of SQLite's own."""
    prefix = base.name + _ARCHIVE
    return [
        path
        for path in base.parent.glob("*")
        if path.name.startswith(prefix) and "-" not in path.name[len(prefix) :]
    ]
