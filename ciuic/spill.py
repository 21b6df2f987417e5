"""Tables that stay small in memory: what does not fit lies in a nameless temporary file.

For what a snapshot has to remember of each changed thing, be it ten or a hundred million. Guarantees: at most some ten thousand
entries of each table are in memory, and a fixed part of the file; a table that never held more is a dictionary and
costs what one costs. The file loses its name as soon as it is open, so that a crash leaves nothing (or, in that very moment, an empty one). What
goes wrong with it is an OSError. Belongs to one thread.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, Final

MOST_ENTRIES = 32 << 10
"""In memory, of a table: some 5 MB."""
_SETTINGS: Final = (
    "locking_mode=EXCLUSIVE",
    "journal_mode=OFF",
    "synchronous=OFF",
    "cache_size=-16384",
    "temp_store=MEMORY",
)
"""One user, one process, nothing to be kept; 16 MiB of it in memory."""
_FETCHED_ROWS: Final = 1024
_PAGE_NAMES: Final = 64
"""So many names of a table that was written out are in memory at a time. A capture goes through one table for each level of a
directory chain: at 2,048 levels that is 60 MB of the longest names."""
_NAME_OVERHEAD_BYTES: Final = 200
"""What a name costs in memory beyond its length: objects, and its places in a dictionary and a list."""
_SIGN: Final = 1 << 63
_SCHEMA: Final = """
CREATE TABLE numbers (owner INTEGER, number INTEGER, value BLOB, PRIMARY KEY (owner, number)) WITHOUT ROWID;
CREATE TABLE names (owner INTEGER, name BLOB, value INTEGER, PRIMARY KEY (owner, name)) WITHOUT ROWID;
"""


class Spill:
    """Where tables go that have become large. Makes its file when the first does."""

    def __init__(self, directory: str, *, most_entries: int = 0) -> None:
        """``directory``: with room for some hundred bytes of each entry."""
        self.most_entries = most_entries or MOST_ENTRIES
        self._directory = directory
        self._db: sqlite3.Connection | None = None
        self._owners = 0

    def numbers(self) -> NumberTable:
        """A new table of values by number."""
        self._owners += 1
        return NumberTable(self, self._owners)

    def names(self) -> NameTable:
        """A new table of numbers by name."""
        self._owners += 1
        return NameTable(self, self._owners)

    def close(self) -> None:
        """The tables are gone."""
        if self._db is not None:
            self._db.close()
        self._db = None

    def execute(self, statement: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        try:
            return self._open().execute(statement, values)
        except sqlite3.Error as error:
            raise _as_os_error(error) from error

    def rows(self, statement: str, values: tuple[Any, ...]) -> Iterator[Any]:
        cursor = self.execute(statement, values)
        while True:
            try:
                rows = cursor.fetchmany(_FETCHED_ROWS)
            except sqlite3.Error as error:
                raise _as_os_error(error) from error
            if not rows:
                return
            yield from rows

    def add(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        try:
            self._open().executemany(statement, rows)
        except sqlite3.Error as error:
            raise _as_os_error(error) from error

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            # Not SQLite's own temporary database: where that lies is settled when the process starts.
            fd, path = tempfile.mkstemp(prefix=".spill-", dir=self._directory)
            os.close(fd)
            try:
                self._db = sqlite3.connect(path, isolation_level=None, cached_statements=32)
                for setting in _SETTINGS:
                    self._db.execute(f"PRAGMA {setting}")
                self._db.executescript(_SCHEMA)
                self._db.execute("BEGIN")  # for good: nothing is ever taken back
            finally:
                os.unlink(path)
        return self._db


class NumberTable:
    """Values by numbers from 0 to 2**64 - 1."""

    def __init__(self, spill: Spill, owner: int) -> None:
        self._spill = spill
        self._owner = owner
        self._recent: dict[int, bytes] = {}
        self._is_spilled = False

    def __bool__(self) -> bool:
        return self._is_spilled or bool(self._recent)

    def __contains__(self, number: int) -> bool:
        return self.get(number) is not None

    def get(self, number: int) -> bytes | None:
        value = self._recent.get(number)
        if value is None and self._is_spilled:
            row = self._spill.execute(
                "SELECT value FROM numbers WHERE owner = ? AND number = ?", (self._owner, _signed(number))
            ).fetchone()
            value = row[0] if row else None
        return value

    def put(self, number: int, value: bytes) -> None:
        self._recent[number] = value
        if len(self._recent) >= self._spill.most_entries:
            self._spill_recent()

    def items(self) -> Iterator[tuple[int, bytes]]:
        """All of it, in no order that means anything. Nothing may be put meanwhile."""
        if self._is_spilled:
            self._spill_recent()
            rows = self._spill.rows("SELECT number, value FROM numbers WHERE owner = ?", (self._owner,))
            yield from ((number % (2 * _SIGN), value) for number, value in rows)
        else:
            yield from self._recent.items()

    def _spill_recent(self) -> None:
        self._is_spilled = True
        rows = ((self._owner, _signed(number), value) for number, value in sorted(self._recent.items()))
        self._spill.add("INSERT OR REPLACE INTO numbers VALUES (?,?,?)", rows)
        self._recent = {}


class NameTable:
    """Numbers from -2**63 to 2**64 - 2 by name, in byte order."""

    def __init__(self, spill: Spill, owner: int) -> None:
        self._spill = spill
        self._owner = owner
        self._recent: dict[bytes, int] = {}
        self._recent_bytes = 0
        self._is_spilled = False

    def __contains__(self, name: bytes) -> bool:
        if name in self._recent:
            return True
        found = (
            self._is_spilled
            and self._spill.execute(
                "SELECT 1 FROM names WHERE owner = ? AND name = ?", (self._owner, name)
            ).fetchone()
        )
        return bool(found)

    @property
    def held_bytes(self) -> int:
        """Upper bound of what its names take in memory, also while `items` goes through them."""
        return _PAGE_NAMES * (_NAME_OVERHEAD_BYTES + 255) if self._is_spilled else self._recent_bytes

    def put(self, name: bytes, value: int = 0) -> None:
        self._recent[name] = value
        self._recent_bytes += len(name) + _NAME_OVERHEAD_BYTES
        if len(self._recent) >= self._spill.most_entries:
            self.write_out()

    def items(self) -> Iterator[tuple[bytes, int]]:
        """All of it in byte order. Nothing may be put meanwhile."""
        if self._is_spilled:
            self.write_out()
            yield from self._pages()
        else:
            yield from sorted(self._recent.items())

    def _pages(self) -> Iterator[tuple[bytes, int]]:
        """Page by page and without an open cursor between them: thousands of tables may be gone through at once."""
        statement = "SELECT name, value FROM names WHERE owner = ? AND name {} ? ORDER BY name LIMIT ?"
        after, comparison = b"", ">="
        while page := list(self._spill.rows(statement.format(comparison), (self._owner, after, _PAGE_NAMES))):
            yield from ((name, value if value >= -1 else value + 2 * _SIGN) for name, value in page)
            after, comparison = page[-1][0], ">"

    def clear(self) -> None:
        """Its room is given to others."""
        self._recent, self._recent_bytes = {}, 0
        if self._is_spilled:
            self._spill.execute("DELETE FROM names WHERE owner = ?", (self._owner,))
            self._is_spilled = False

    def write_out(self) -> None:
        """Nothing of it is in memory any more."""
        self._is_spilled = True
        rows = ((self._owner, name, _signed(value)) for name, value in sorted(self._recent.items()))
        self._spill.add("INSERT OR REPLACE INTO names VALUES (?,?,?)", rows)
        self._recent, self._recent_bytes = {}, 0


def _signed(number: int) -> int:
    """As SQLite has it: 64 bits with a sign."""
    return number if number < _SIGN else number - 2 * _SIGN


def _as_os_error(error: sqlite3.Error) -> OSError:
    number = errno.ENOSPC if "full" in str(error) else errno.EIO
    return OSError(number, f"temporary tables: {error}")
