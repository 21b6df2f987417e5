"""Write the journal of a session: its files, its open files and directories; read that of a predecessor.

Guarantees:

* A record is in its file when ``append`` returns; that takes about a microsecond.
* A file that is full is followed by a new one and taken into the archive by a background thread, in small
  slices so that the job does not notice; then it is removed. A successor applies the files that are not in
  the archive yet.
* Open files and directories are in the journal before the kernel knows of them. A request that opened a file and
  was not answered is found by its number when the kernel sends it again, so it opens nothing twice; a handle is
  closed once.
* No failure in here reaches the job: a journal that cannot be written is given up, and the session ends with
  its worker.
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

from ciuic.fuse_layer.journal import records
from ciuic.fuse_layer.journal.inherited_session import InheritedSession, JournalArchive
from ciuic.fuse_layer.journal.records import OpenedDirectory, OpenedFile

log = structlog.get_logger(__name__)

FULL_BYTES: Final = 512 << 10
"""Size of the files beside the archive from which on they are taken in: some ten thousand records, which a
successor applies in some ten milliseconds."""
_MAX_FILES: Final = 16
"""Number of files from which on they are taken in, however short they are."""
_SLICE_PAUSE_SECONDS: Final = 0.001
"""Pause after each slice that is taken in, in which the job has the interpreter."""
_MAX_PAUSED_BYTES: Final = 3 << 20
"""Size of the files beside the archive above which there are no pauses.

A kill right after a million look-ups found 25 MB outside the archive, and the job waited 1.26 s; without
pauses above 3 MB the longest of 39 kills was 0.36 s.
"""
_ARCHIVE: Final = ".archive-"
LISTING_KEPT_FROM: int = 32
"""Names from which on a listing is kept. A shorter one is read by one request, and a successor never goes on
with it."""
MAX_LISTED_BYTES: int = 64 << 20
"""Limit of the listings in the journal, by the memory that they take when the archive reads them back. Where
more are under way, a successor lists the others anew: a program in the middle of one then may miss a name.
One alone is always kept."""
_NAME_OVERHEAD_BYTES: int = 50
"""Memory of a bytes object beside its content."""


class JournalWriter:
    """Appends to the files ``<base>.<number>``.

    Thread-safe; None in place of one means that nothing is written.
    """

    def __init__(
        self, base: Path, *, inherited: InheritedSession | None = None, full_bytes: int = FULL_BYTES
    ) -> None:
        self._base = base
        self._full_bytes = full_bytes
        # Serving threads append while the background thread changes files.
        self._lock = threading.Lock()
        self._numbers = _numbers(base)
        self._fd = -1
        self._size = sum(_path(base, number).stat().st_size for number in self._numbers)
        self._begin = b""
        archive = inherited.archive if inherited is not None else None
        self._archive_path = Path(f"{base}{_ARCHIVE}{secrets.token_hex(4)}")
        self._generation = 1
        if isinstance(archive, JournalArchive):
            self._archive_path, self._generation = archive.path, archive.generation
        self._archive: JournalArchive | None = None
        """Archive of the thread that takes files in."""
        self._absorbing = False
        self.kept = True
        """True if a successor could go on with the session."""

    @property
    def absorbing(self) -> bool:
        """True if files are being taken into the archive."""
        return self._absorbing

    def begin(self, minor: int, flags: int, max_write_bytes: int) -> None:
        """Start a new file for a session that was just negotiated, or taken over."""
        self._begin = records.begin_record(minor, flags, max_write_bytes)
        self._next_file()

    def _next_file(self) -> None:
        number = (self._numbers[-1] if self._numbers else 0) + 1
        # Opened and begun outside the lock, which every request takes.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(_path(self._base, number), flags, 0o600)
        # Every file begins with the terms of the session, because the archive, into which earlier ones go,
        # has none.
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
        """Remove the files of a session that ends without a successor. A second call does nothing."""
        # Another session may have files of the same names by the second call.
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
                # Not synced: the journal outlives the process, and a machine that fails takes the session
                # with it.
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
            threading.Thread(target=self._absorb, name="journal", daemon=True).start()

    def _give_up(self, error: Exception) -> None:
        log.error("ledger_given_up", error=str(error))
        self.remove()

    @property
    def _is_full(self) -> bool:
        return self._size > self._full_bytes or len(self._numbers) > _MAX_FILES

    # -- into the archive -----------------------------------------------------------------------------

    def _absorb(self) -> None:
        """Take files into the archive until the rest is short."""
        try:
            if self._archive is None:
                self._archive = JournalArchive(self._archive_path, generation=self._generation)
            while self.kept and self._is_full:
                self._next_file()
                # All but the file that is being written.
                for number in self._numbers[:-1]:
                    self._absorb_file(self._archive, number)
        except (OSError, sqlite3.Error) as error:
            if self.kept:
                self._give_up(error)
        finally:
            self._absorbing = False

    def _absorb_file(self, archive: JournalArchive, number: int) -> None:
        path = _path(self._base, number)
        data = path.read_bytes()
        # Files up to ``absorbed`` are in: a predecessor was killed between the transaction and the removal.
        if number > archive.absorbed:
            for _ in archive.absorb(number, data):
                if not self.kept:
                    return
                if self._size < _MAX_PAUSED_BYTES:
                    time.sleep(_SLICE_PAUSE_SECONDS)
        with self._lock:
            self._numbers.remove(number)
            self._size -= len(data)
        path.unlink(missing_ok=True)


def replay(base: Path) -> InheritedSession | None:
    """Return the tables that the journal of ``base`` describes; None without one that this version understands."""
    # The archive first, then the files that it does not have yet, in the order of their numbers.
    try:
        archives = _archives(base)
        archive = JournalArchive(archives[0]) if archives else None
        inherited = InheritedSession(archive)
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
    """Remove the files of ``base``."""
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
    """Return the archives of ``base``, at most one; files that SQLite keeps beside it are left out."""
    prefix = base.name + _ARCHIVE
    return [
        path
        for path in base.parent.glob("*")
        if path.name.startswith(prefix) and "-" not in path.name[len(prefix) :]
    ]


class HandleJournal:
    """Handles of one session. Thread-safe."""

    def __init__(self, to: JournalWriter | None, inherited: InheritedSession | None = None) -> None:
        self._journal = to
        # A table and its record change in one step: records of one handle are in the journal in the order of
        # the changes.
        self._lock = threading.Lock()
        self.files: dict[int, OpenedFile] = dict(inherited.files) if inherited else {}
        self.directories: dict[int, OpenedDirectory] = dict(inherited.directories) if inherited else {}
        listings = inherited.listings if inherited else {}
        self._listing_bytes = {handle: _size_of(names) for handle, names in listings.items()}
        self._listed_bytes = sum(self._listing_bytes.values())
        # Request → the number that a predecessor noted before it carried the request out.
        self.intents = dict(inherited.intents) if inherited else {}
        # Only a predecessor's requests come again; this process's own opens are never looked up by number.
        self._unanswered = {opened.unique: opened for opened in self.files.values()}
        self._unanswered_directories = {opened.unique: opened for opened in self.directories.values()}

    # -- what was carried out already -----------------------------------------------------------------

    def file_of(self, unique: int) -> OpenedFile | None:
        """Return the file that a predecessor opened for the request that comes again now."""
        opened = self._unanswered.get(unique)
        return opened if opened is not None and opened.handle in self.files else None

    def directory_of(self, unique: int) -> OpenedDirectory | None:
        """Return the directory that a predecessor opened for the request that comes again now."""
        opened = self._unanswered_directories.get(unique)
        return opened if opened is not None and opened.handle in self.directories else None

    # -- changes --------------------------------------------------------------------------------------

    def opened(self, opened: OpenedFile) -> None:
        """Note an open file."""
        with self._lock:
            self.files[opened.handle] = opened
            self._append(records.opened_record(opened))

    def closed(self, handle: int) -> bool:
        """Note that a file is closed; return whether it was open."""
        with self._lock:
            if self.files.pop(handle, None) is None:
                return False
            self._append(records.closed_record(handle))
            return True

    def directory_opened(self, opened: OpenedDirectory) -> None:
        """Note an open directory."""
        with self._lock:
            self.directories[opened.handle] = opened
            self._append(records.directory_opened_record(opened))

    def directory_closed(self, handle: int) -> None:
        """Note that a directory is closed."""
        with self._lock:
            if self.directories.pop(handle, None) is not None:
                self._listed_bytes -= self._listing_bytes.pop(handle, 0)
                self._append(records.directory_closed_record(handle))

    def listed(self, handle: int, names: list[bytes]) -> None:
        """Note the names that offsets of a directory handle count."""
        if len(names) < LISTING_KEPT_FROM:
            return
        with self._lock:
            if self._journal is not None and handle in self.directories:
                others_bytes = self._listed_bytes - self._listing_bytes.pop(handle, 0)
                size_bytes = _size_of(names)
                if others_bytes and others_bytes + size_bytes > MAX_LISTED_BYTES:
                    # An empty record, because an earlier listing of this handle in the journal is not valid
                    # any more.
                    names, size_bytes = [], 0
                self._listed_bytes = others_bytes + size_bytes
                self._listing_bytes[handle] = size_bytes
                self._append(records.listing_record(handle, names))

    def intends(self, unique: int, number: int) -> None:
        """Note that a request which must not be repeated is carried out now (`records.intent_record`)."""
        self._append(records.intent_record(unique, number))

    def _append(self, record: bytes) -> None:
        if self._journal is not None:
            self._journal.append(record)


def _size_of(names: list[bytes]) -> int:
    return sum(map(len, names)) + _NAME_OVERHEAD_BYTES * len(names)
