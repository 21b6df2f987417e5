"""Snapshots: which there are, what they are called, what is in them.

The files in snapshots/ are the truth and the catalogue in SQLite only a faster way to list them: a snapshot
is listed if and only if its file is there. Nothing here takes a lock or writes, so it works on read-only
media and beside a writer.
"""

from __future__ import annotations

from ciuic.repository.model import SnapshotInfo, UnreadableSnapshot
from ciuic.types import Snapshot, SnapshotId

_Unreadables = list[UnreadableSnapshot]  # `list` means the method inside the class


class SnapshotStore:
    """The committed snapshots of one repository."""

    def ids(self) -> list[SnapshotId]:
        """All, newest first."""
        raise NotImplementedError

    def list(
        self,
        *,
        root: bytes | None = None,
        tag: str | None = None,
        since_ns: int | None = None,
        until_ns: int | None = None,
        limit: int | None = None,
    ) -> list[SnapshotInfo]:
        """Newest first; ``since_ns`` and ``until_ns`` inclusive. About a millisecond for 1,000 snapshots.

        A snapshot file that cannot be read is left out here and named by `unreadable`.
        """
        raise NotImplementedError

    def info(self, id_: SnapshotId) -> SnapshotInfo:
        """One line of `list`. NotFound, DamagedSnapshot."""
        raise NotImplementedError

    def load(self, id_: SnapshotId) -> Snapshot:
        """The snapshot with its marks applied. NotFound; DamagedSnapshot; UnsupportedFormat.

        Marks that cannot be read count as held: damage must never lead to deletion.
        """
        raise NotImplementedError

    def latest(self, root: bytes | None = None) -> SnapshotInfo | None:
        """The newest one (that has this root)."""
        raise NotImplementedError

    def resolve(self, text: str) -> SnapshotId:
        """The snapshot meant by an id, an unambiguous prefix (with or without cs-), `latest`, `latest~N` or a
        time.

        A time is local unless it carries an offset: "2023-06-15 15:00" or RFC 3339; the newest snapshot not
        after it, where seconds count whole; a date alone means the end of that day. NotFound; UsageError when
        ambiguous.
        """
        raise NotImplementedError

    def unreadable(self) -> _Unreadables:
        """Files in snapshots/ that cannot be read, found by reading them all. Never raises for their content."""
        raise NotImplementedError

    def new_id(self, taken: set[str] | frozenset[str] = frozenset()) -> SnapshotId:
        """A fresh id, neither in use nor in ``taken`` (cut but not yet committed)."""
        raise NotImplementedError
