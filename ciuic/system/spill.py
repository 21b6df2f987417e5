"""Tables with bounded memory: entries beyond a limit are written to an unnamed temporary file.

They hold what a snapshot has to remember of each change, whether there are ten or a hundred million. Guarantees: at most some ten
thousand entries of each table, and a fixed part of the file, are in memory. A table that never had more is a dictionary, at the cost
of one. The file is unlinked as soon as it is open, so that a crash leaves nothing (or, in that very moment, an empty file). Its errors
are OSError. Belongs to one thread.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, Final

MAX_ENTRIES = 32 << 10
"""Limit of the entries of a table in memory: some 5 MB."""
# One user, one process, and nothing that must survive; 16 MiB of the file are cached.
_SETTINGS: Final = (
    "locking_mode=EXCLUSIVE",
    "journal_mode=OFF",
    "synchronous=OFF",
    "cache_size=-16384",
    "temp_store=MEMORY",
)
_FETCHED_ROWS: Final = 1024
# Names of a spilled table that are in memory at a time. A capture iterates over one table for each level of a directory chain: at
# 2,048 levels that is 60 MB of the longest names.
_PAGE_NAMES: Final = 64
# Memory of a name beyond its length: objects, and its entries in a dictionary and a list.
_NAME_OVERHEAD_BYTES: Final = 200
_SIGN: Final = 1 << 63
# Two tables for all of a Spill, by owner: a capture may have one for each level of a directory chain. Without
# rowids a row is stored once, in the order of its key.
_SCHEMA: Final = """
CREATE TABLE numbers (owner INTEGER, number INTEGER, value BLOB, PRIMARY KEY (owner, number)) WITHOUT ROWID;
CREATE TABLE names (owner INTEGER, name BLOB, value INTEGER, PRIMARY KEY (owner, name)) WITHOUT ROWID;
"""


class Spill:
    """The temporary file of large tables, created when the first table becomes large.

    Args:
        directory: directory with room for some hundred bytes of each entry.
        max_entries: entries of each table in memory; 0: `MAX_ENTRIES`.
    """

    def __init__(self, directory: str, *, max_entries: int = 0) -> None:
        self.max_entries = max_entries or MAX_ENTRIES
        self._directory = directory
        self._db: sqlite3.Connection | None = None
        self._owners = 0

    def numbers(self) -> NumberTable:
        """Return a new table of values by number."""
        self._owners += 1
        return NumberTable(self, self._owners)

    def names(self) -> NameTable:
        """Return a new table of numbers by name."""
        self._owners += 1
        return NameTable(self, self._owners)

    def close(self) -> None:
        """Delete all tables."""
        if self._db is not None:
            self._db.close()
        self._db = None

    def execute(self, statement: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        """Execute a statement. OSError."""
        try:
            return self._open().execute(statement, values)
        except sqlite3.Error as error:
            raise _as_os_error(error) from error

    def rows(self, statement: str, values: tuple[Any, ...]) -> Iterator[Any]:
        """Yield the rows of a query. OSError."""
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
        """Execute a statement for each row. OSError."""
        try:
            self._open().executemany(statement, rows)
        except sqlite3.Error as error:
            raise _as_os_error(error) from error

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            # Not SQLite's own temporary database: its directory is fixed when the process starts.
            fd, path = tempfile.mkstemp(prefix=".spill-", dir=self._directory)
            os.close(fd)
            try:
                self._db = sqlite3.connect(path, isolation_level=None, cached_statements=32)
                for setting in _SETTINGS:
                    self._db.execute(f"PRAGMA {setting}")
                self._db.executescript(_SCHEMA)
                # One transaction that never ends: nothing has to be durable, and a commit for each statement would cost more.
                self._db.execute("BEGIN")
            finally:
                os.unlink(path)
        return self._db


class NumberTable:
    """Table of values by numbers from 0 to 2**64 - 1."""

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
        """Return the value of a number, None if there is none. OSError."""
        value = self._recent.get(number)
        if value is None and self._is_spilled:
            row = self._spill.execute(
                "SELECT value FROM numbers WHERE owner = ? AND number = ?", (self._owner, _signed(number))
            ).fetchone()
            value = row[0] if row else None
        return value

    def put(self, number: int, value: bytes) -> None:
        """Set the value of a number. OSError."""
        self._recent[number] = value
        if len(self._recent) >= self._spill.max_entries:
            self._spill_recent()

    def items(self) -> Iterator[tuple[int, bytes]]:
        """Yield all entries, in an undefined order. Nothing may be put meanwhile."""
        if self._is_spilled:
            self._spill_recent()
            rows = self._spill.rows("SELECT number, value FROM numbers WHERE owner = ?", (self._owner,))
            yield from ((number % (2 * _SIGN), value) for number, value in rows)
        else:
            yield from self._recent.items()

    def _spill_recent(self) -> None:
        self._is_spilled = True
        # Sorted, so that SQLite writes neighbouring rows to the same pages.
        rows = ((self._owner, _signed(number), value) for number, value in sorted(self._recent.items()))
        self._spill.add("INSERT OR REPLACE INTO numbers VALUES (?,?,?)", rows)
        self._recent = {}


class NameTable:
    """Table of numbers from -1 to 2**64 - 2 by name, in byte order."""

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
        """Upper bound of the memory that its names take, also while `items` iterates over them."""
        return _PAGE_NAMES * (_NAME_OVERHEAD_BYTES + 255) if self._is_spilled else self._recent_bytes

    def put(self, name: bytes, value: int = 0) -> None:
        """Set the number of a name. OSError."""
        self._recent[name] = value
        self._recent_bytes += len(name) + _NAME_OVERHEAD_BYTES
        if len(self._recent) >= self._spill.max_entries:
            self.write_out()

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Yield all entries in byte order. Nothing may be put meanwhile."""
        if self._is_spilled:
            self.write_out()
            yield from self._pages()
        else:
            yield from sorted(self._recent.items())

    def _pages(self) -> Iterator[tuple[bytes, int]]:
        """Yield the entries page by page."""
        # Without an open cursor between two pages: thousands of tables may be iterated at the same time.
        statement = "SELECT name, value FROM names WHERE owner = ? AND name {} ? ORDER BY name LIMIT ?"
        after, comparison = b"", ">="
        while page := list(self._spill.rows(statement.format(comparison), (self._owner, after, _PAGE_NAMES))):
            # -1 is a value of its own (a name whose binding has not changed), so the greatest number, which
            # is stored as -1, cannot be told from it and is left out of the range.
            yield from ((name, value if value >= -1 else value + 2 * _SIGN) for name, value in page)
            after, comparison = page[-1][0], ">"

    def clear(self) -> None:
        """Remove all entries; other tables may use their space."""
        self._recent, self._recent_bytes = {}, 0
        if self._is_spilled:
            self._spill.execute("DELETE FROM names WHERE owner = ?", (self._owner,))
            self._is_spilled = False

    def write_out(self) -> None:
        """Write all entries to the file, so that none is in memory."""
        self._is_spilled = True
        rows = ((self._owner, name, _signed(value)) for name, value in sorted(self._recent.items()))
        self._spill.add("INSERT OR REPLACE INTO names VALUES (?,?,?)", rows)
        self._recent, self._recent_bytes = {}, 0


def _signed(number: int) -> int:
    """Return a number as SQLite stores it: 64 bits with a sign."""
    return number if number < _SIGN else number - 2 * _SIGN


def _as_os_error(error: sqlite3.Error) -> OSError:
    # By its text, "database or disk is full": exceptions have an error code only from Python 3.11 on.
    number = errno.ENOSPC if "full" in str(error) else errno.EIO
    return OSError(number, f"temporary tables: {error}")
