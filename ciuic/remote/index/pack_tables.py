"""Rows of the index that name packs: number, reference, size, age, and how many chunks each has.

A number is never used again, so that rows of chunks may stay behind for a while when their pack is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from ciuic.remote.format.names import PackRef
from ciuic.remote.index.pack_numbers import PackNumbers, PackRefs
from ciuic.repository.index.database import IndexDatabase, Transaction
from ciuic.repository.model import PackRecord

_VERSION: Final = 1
_VERSION_FACT: Final = "remote_index_version"
_FINISHED_FACT: Final = "remote_rounds_finished"
_LEFT_BEHIND_FACT: Final = "remote_rows_left_behind"
_SCHEMA: Final = """
DROP TABLE IF EXISTS remote_packs;
CREATE TABLE remote_packs (
  number      INTEGER PRIMARY KEY AUTOINCREMENT,   -- AUTOINCREMENT: never one that was used
  ref         TEXT NOT NULL UNIQUE,
  size        INTEGER NOT NULL,
  modified_ns INTEGER NOT NULL,                    -- by the store's clock
  records     INTEGER NOT NULL
);
DROP TABLE IF EXISTS unsorted_chunks;
CREATE TABLE unsorted_chunks (
  id BLOB NOT NULL, pack INTEGER NOT NULL, offset INTEGER NOT NULL,
  stored INTEGER NOT NULL, raw INTEGER NOT NULL, flags INTEGER NOT NULL
);
"""


class RemotePack(NamedTuple):
    """Pack of the remote whose table the index has."""

    ref: PackRef
    size_bytes: int
    modified_ns: int
    """Time of its upload by the store's clock."""
    records: int


class PackTables:
    """Packs in one index. Raises sqlite3.Error."""

    def __init__(self, index: IndexDatabase) -> None:
        self._index = index
        self._db = index.db
        if index.fact(_VERSION_FACT) != _VERSION:
            # New, or emptied because of its version: then rows of packs without their chunks would lie.
            self._db.executescript(_SCHEMA)
            index.clear()
            index.set_fact(_VERSION_FACT, _VERSION)
        # Left behind by a process that was killed while it filled the index.
        self.sort()
        self.refs: Final = PackRefs(self._db)
        self.numbers: Final = PackNumbers(self._db)

    @property
    def rounds_finished(self) -> int | None:
        """Last round whose deletions the index has; None if it was never complete."""
        found = self._index.fact(_FINISHED_FACT)
        # 0 is what an unknown fact is read as.
        return found - 2 if found else None

    def set_rounds_finished(self, round_: int) -> None:
        """Store `rounds_finished`; -1 for no round."""
        self._index.set_fact(_FINISHED_FACT, round_ + 2)

    def all(self) -> list[RemotePack]:
        """Return every pack."""
        rows = self._db.execute("SELECT ref, size, modified_ns, records FROM remote_packs")
        return [
            RemotePack(PackRef(ref), size, modified_ns, records) for ref, size, modified_ns, records in rows
        ]

    def add(self, packs: Iterable[tuple[RemotePack, list[PackRecord]]], *, unsorted: bool = False) -> None:
        """Add packs with their chunks, all or none.

        With ``unsorted`` the chunks are found only after `sort`, which must follow before anything else. Ids come at
        random: rows that are put into the table of twenty million in batches of 200,000 would write each of its
        pages a hundred times.
        """
        rows: list[tuple[bytes, int, int, int, int, int]] = []
        bases: list[tuple[bytes, int, int, bytes]] = []
        with Transaction(self._db):
            for pack, records in packs:
                if pack.ref in self.numbers:
                    continue
                number = self._insert(pack)
                rows += ((r.id, number, r.offset, r.stored_bytes, r.raw_bytes, r.flags) for r in records)
                bases += ((r.id, number, r.offset, r.base) for r in records if r.base)
            if not unsorted:
                # In the order of the table, so that each of its pages is visited once.
                rows.sort()
            table = "unsorted_chunks" if unsorted else "chunks"
            self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?,?,?,?,?,?)", rows)
            self._db.executemany("INSERT OR REPLACE INTO bases VALUES (?,?,?,?)", bases)

    def sort(self) -> None:
        """Put chunks that were added unsorted where they are found."""
        if self._db.execute("SELECT 1 FROM unsorted_chunks LIMIT 1").fetchone():
            with Transaction(self._db):
                self._db.execute(
                    "INSERT OR REPLACE INTO chunks SELECT * FROM unsorted_chunks ORDER BY id, pack, offset"
                )
                self._db.execute("DELETE FROM unsorted_chunks")

    def _insert(self, pack: RemotePack) -> int:
        cursor = self._db.execute(
            "INSERT INTO remote_packs (ref, size, modified_ns, records) VALUES (?,?,?,?)", pack
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def drop(self, refs: Iterable[PackRef]) -> None:
        """Forget packs. Their rows of chunks stay until there are many, because they lie in the order of ids."""
        gone = {ref: number for ref in refs if (number := self.numbers.get(ref)) is not None}
        if not gone:
            return
        left_behind = self._index.fact(_LEFT_BEHIND_FACT)
        with Transaction(self._db):
            for ref in gone:
                row = self._db.execute("SELECT records FROM remote_packs WHERE ref=?", (ref,)).fetchone()
                left_behind += row[0] if row else 0
                self._db.execute("DELETE FROM remote_packs WHERE ref=?", (ref,))
            self._index.set_fact(_LEFT_BEHIND_FACT, left_behind)
        for number in gone.values():
            self.refs.forget(number)
        (known,) = self._db.execute("SELECT COALESCE(SUM(records), 0) FROM remote_packs").fetchone()
        if left_behind > known // 3:
            self._purge()

    def _purge(self) -> None:
        """Delete the rows of forgotten packs, which reads the whole table."""
        with Transaction(self._db):
            self._index.set_fact(_LEFT_BEHIND_FACT, 0)
            for table in ("chunks", "bases"):
                self._db.execute(f"DELETE FROM {table} WHERE pack NOT IN (SELECT number FROM remote_packs)")
