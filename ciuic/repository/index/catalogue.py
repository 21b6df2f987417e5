"""Catalogue of snapshots in the index: rows that save opening every snapshot file for a list."""

from __future__ import annotations

from collections.abc import Iterable

from ciuic.repository.index.database import IndexDatabase, Transaction, has_places
from ciuic.repository.model import SnapshotInfo
from ciuic.types import Snapshot, SnapshotId

# No tag contains it: a tag has no blanks, of which U+001F is one to Python.
_SEPARATOR = "\x1f"
# Those of every index; `placed_ns` is missing in one that only an earlier ciuic has written.
_COLUMNS = "id,time_ns,size_bytes,new_bytes,files,tags,message,parent,host,roots,held,hold_reason,signature"


class Catalogue:
    """Rows of one index. Raises sqlite3.Error."""

    def __init__(self, index: IndexDatabase) -> None:
        self._db = index.db

    def rows(self, *, newest: int = -1) -> list[tuple[SnapshotInfo, str]]:
        """Return each snapshot with the signature of the marks file that the row was made from.

        ``newest`` limits the rows to that many of the newest, in the order of `list`.
        """
        # SQLite sorts and cuts, so that the newest snapshot does not cost a row for every other one.
        placed = "placed_ns" if has_places(self._db) else "0"
        order = f" ORDER BY max({placed}, time_ns) DESC, id LIMIT {newest}" if newest >= 0 else ""
        return [
            (
                SnapshotInfo(
                    id=SnapshotId(id_),
                    time_ns=time_ns,
                    size_bytes=size_bytes,
                    new_bytes=new_bytes,
                    files=files,
                    tags=tuple(tags.split(_SEPARATOR)) if tags else (),
                    message=message,
                    parent=parent,
                    host=host,
                    roots=tuple(roots.split(b"\0")) if roots else (),
                    held=bool(held),
                    hold_reason=hold_reason,
                    placed_ns=placed_ns,
                ),
                signature,
            )
            for (
                id_,
                time_ns,
                size_bytes,
                new_bytes,
                files,
                tags,
                message,
                parent,
                host,
                roots,
                held,
                hold_reason,
                signature,
                placed_ns,
            ) in self._db.execute(f"SELECT {_COLUMNS},{placed} FROM snapshots{order}")
        ]

    def put(self, infos: Iterable[tuple[SnapshotInfo, str]]) -> None:
        """Store rows."""
        with Transaction(self._db):
            self._db.executemany(
                # Replaced as a whole, because a row also has the marks.
                f"INSERT OR REPLACE INTO snapshots ({_COLUMNS},placed_ns) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    (
                        str(info.id),
                        info.time_ns,
                        info.size_bytes,
                        info.new_bytes,
                        info.files,
                        _SEPARATOR.join(info.tags),
                        info.message,
                        str(info.parent),
                        info.host,
                        b"\0".join(info.roots),
                        int(info.held),
                        info.hold_reason,
                        signature,
                        info.placed_ns,
                    )
                    for info, signature in infos
                ),
            )

    def remove(self, ids: Iterable[str]) -> None:
        """Delete rows."""
        with Transaction(self._db):
            self._db.executemany("DELETE FROM snapshots WHERE id=?", ((str(id_),) for id_ in ids))


def info_of(snapshot: Snapshot) -> SnapshotInfo:
    """Return the line of `list` for a snapshot."""
    return SnapshotInfo(
        id=snapshot.id,
        time_ns=snapshot.time_ns,
        size_bytes=snapshot.size_bytes,
        new_bytes=snapshot.new_bytes,
        files=snapshot.files,
        tags=snapshot.tags,
        message=snapshot.message,
        parent=snapshot.parent,
        host=snapshot.host,
        roots=tuple(root.path for root in snapshot.roots),
        held=snapshot.held,
        hold_reason=snapshot.hold_reason,
        placed_ns=snapshot.placed_ns,
    )
