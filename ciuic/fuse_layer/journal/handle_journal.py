"""Open files and directories of a session, in the journal before the kernel knows of them.

Guarantees: a request that opened a file and was not answered is found by its number when the kernel sends it
again, so it opens nothing twice; a handle is closed once.
"""

from __future__ import annotations

import threading

from ciuic.fuse_layer.journal import session_journal
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.journal.session_journal import OpenedDirectory, OpenedFile

LISTING_KEPT_FROM: int = 32
"""Names from which on a listing is kept. A shorter one is read by one request, and a successor never goes on
with it."""
MAX_LISTED_BYTES: int = 64 << 20
"""Limit of the listings in the journal, by the memory that they take when the archive reads them back. Where
more are under way, a successor lists the others anew: a program in the middle of one then may miss a name.
One alone is always kept."""
_NAME_OVERHEAD_BYTES: int = 50
"""Memory of a bytes object beside its content."""


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
        self._intents = dict(inherited.intents) if inherited else {}
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

    def intent_of(self, unique: int) -> int | None:
        """Return the number that a predecessor noted before it carried out the request."""
        return self._intents.get(unique)

    # -- changes --------------------------------------------------------------------------------------

    def opened(self, opened: OpenedFile) -> None:
        """Note an open file."""
        with self._lock:
            self.files[opened.handle] = opened
            self._append(session_journal.opened_record(opened))

    def closed(self, handle: int) -> bool:
        """Note that a file is closed; return whether it was open."""
        with self._lock:
            if self.files.pop(handle, None) is None:
                return False
            self._append(session_journal.closed_record(handle))
            return True

    def directory_opened(self, opened: OpenedDirectory) -> None:
        """Note an open directory."""
        with self._lock:
            self.directories[opened.handle] = opened
            self._append(session_journal.directory_opened_record(opened))

    def directory_closed(self, handle: int) -> None:
        """Note that a directory is closed."""
        with self._lock:
            if self.directories.pop(handle, None) is not None:
                self._listed_bytes -= self._listing_bytes.pop(handle, 0)
                self._append(session_journal.directory_closed_record(handle))

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
                self._append(session_journal.listing_record(handle, names))

    def intends(self, unique: int, number: int) -> None:
        """Note that a request which must not be repeated is carried out now (session_journal.intent_record)."""
        self._append(session_journal.intent_record(unique, number))

    def _append(self, record: bytes) -> None:
        if self._journal is not None:
            self._journal.append(record)


def _size_of(names: list[bytes]) -> int:
    return sum(map(len, names)) + _NAME_OVERHEAD_BYTES * len(names)
