"""What is open in a session, kept so that a successor can go on with it: each change is in the ledger before the kernel knows.

Guarantees: a request that opened something and was not answered is found by its number when the kernel sends it again, so it
opens nothing twice; a handle is closed once.
"""

from __future__ import annotations

import threading

from ciuic.fuse_layer import ledger
from ciuic.fuse_layer.ledger import Inherited, Opened, OpenedDirectory
from ciuic.fuse_layer.ledger_writer import Ledger

LISTING_KEPT_FROM: int = 32
"""Names. A shorter listing is read by one request, and there is nothing to go on with."""
MAX_LISTED_BYTES: int = 64 << 20
"""What the listings in the ledger take when they are read back, which the archive does beside the work. Where more are under way, a
successor lists the others anew: a program that is in the middle of one then may miss a name. One alone is always kept."""
_NAME_OVERHEAD_BYTES: int = 50


class HandleBook:
    """Of one session. Thread-safe."""

    def __init__(self, to: Ledger | None, inherited: Inherited | None = None) -> None:
        self._ledger = to
        self._lock = threading.Lock()
        self.files: dict[int, Opened] = dict(inherited.files) if inherited else {}
        self.directories: dict[int, OpenedDirectory] = dict(inherited.directories) if inherited else {}
        listings = inherited.listings if inherited else {}
        self._listing_bytes = {handle: _size_of(names) for handle, names in listings.items()}
        self._listed_bytes = sum(self._listing_bytes.values())
        self._intents = dict(inherited.intents) if inherited else {}
        self._unanswered = {opened.unique: opened for opened in self.files.values()}
        self._unanswered_directories = {opened.unique: opened for opened in self.directories.values()}

    # -- what was carried out already -----------------------------------------------------------------

    def file_of(self, unique: int) -> Opened | None:
        """What a predecessor opened for the request that comes again now."""
        opened = self._unanswered.get(unique)
        return opened if opened is not None and opened.handle in self.files else None

    def directory_of(self, unique: int) -> OpenedDirectory | None:
        """The same for a directory."""
        opened = self._unanswered_directories.get(unique)
        return opened if opened is not None and opened.handle in self.directories else None

    def intent_of(self, unique: int) -> int | None:
        """What a predecessor noted before it began to carry out the request."""
        return self._intents.get(unique)

    # -- changes --------------------------------------------------------------------------------------

    def opened(self, opened: Opened) -> None:
        with self._lock:
            self.files[opened.handle] = opened
            self._append(ledger.opened_record(opened))

    def closed(self, handle: int) -> bool:
        """Whether it was open."""
        with self._lock:
            if self.files.pop(handle, None) is None:
                return False
            self._append(ledger.closed_record(handle))
            return True

    def directory_opened(self, opened: OpenedDirectory) -> None:
        with self._lock:
            self.directories[opened.handle] = opened
            self._append(ledger.directory_opened_record(opened))

    def directory_closed(self, handle: int) -> None:
        with self._lock:
            if self.directories.pop(handle, None) is not None:
                self._listed_bytes -= self._listing_bytes.pop(handle, 0)
                self._append(ledger.directory_closed_record(handle))

    def listed(self, handle: int, names: list[bytes]) -> None:
        """The names that the offsets of a listing count."""
        if len(names) < LISTING_KEPT_FROM:
            return
        with self._lock:
            if self._ledger is not None and handle in self.directories:
                others_bytes = self._listed_bytes - self._listing_bytes.pop(handle, 0)
                size_bytes = _size_of(names)
                if others_bytes and others_bytes + size_bytes > MAX_LISTED_BYTES:
                    # What the ledger has of an earlier listing of this handle is not what its offsets count.
                    names, size_bytes = [], 0
                self._listed_bytes = others_bytes + size_bytes
                self._listing_bytes[handle] = size_bytes
                self._append(ledger.listing_record(handle, names))

    def intends(self, unique: int, number: int) -> None:
        """The request is carried out now; see ``ledger.intent_record``."""
        self._append(ledger.intent_record(unique, number))

    def _append(self, record: bytes) -> None:
        if self._ledger is not None:
            self._ledger.append(record)


def _size_of(names: list[bytes]) -> int:
    return sum(map(len, names)) + _NAME_OVERHEAD_BYTES * len(names)
