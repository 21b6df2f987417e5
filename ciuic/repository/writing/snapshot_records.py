"""Records in snapshot and marks files: pure functions of a draft, or of the old marks."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ciuic.repository.config import read_file
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.format.snapshot_format import StoredMarks, decode_marks
from ciuic.types import Snapshot, SnapshotDraft, SnapshotId


def committed_snapshot(draft: SnapshotDraft, new_bytes: int, placed_ns: int = 0) -> Snapshot:
    """Return the snapshot that a commit of the draft makes, with the totals of its roots."""
    return Snapshot(
        id=draft.id,
        time_ns=draft.time_ns,
        host=draft.host,
        roots=draft.roots,
        tags=draft.tags,
        message=draft.message,
        parent=draft.parent,
        # Hard-linked files count in the link table, once for all their names.
        size_bytes=sum(root.entry.total_bytes + root.links_bytes for root in draft.roots),
        new_bytes=new_bytes,
        files=sum(root.entry.total_files + root.links_files for root in draft.roots),
        pair=draft.pair,
        left_out=draft.left_out,
        incomplete=draft.incomplete,
        placed_ns=placed_ns,
    )


def place_in_order(time_ns: int, *, now_ns: int, newest_ns: int, parent_ns: int) -> int:
    """Return `Snapshot.placed_ns` of a snapshot that is about to be committed.

    It comes after its parent, and after those that are dated in the future because the clock was ahead. In
    every other case its time decides: captures that overlap are committed in any order.

    Args:
        time_ns: Its cut.
        now_ns: The clock at the commit.
        newest_ns: Largest place of those that are there; -1 for none.
        parent_ns: Place of its parent; -1 for none.
    """
    floor_ns = max(newest_ns if newest_ns > now_ns else -1, parent_ns)
    return floor_ns + 1 if time_ns <= floor_ns else 0


def read_marks(id_: SnapshotId, path: str) -> StoredMarks:
    """Return the marks in this file, for a change of them."""
    try:
        return decode_marks(id_, read_file(path))
    except FileNotFoundError:
        return StoredMarks(id=id_)
    except (DamagedSnapshot, UnsupportedFormat):
        # Unreadable marks count as held, as in `SnapshotStore.load`.
        return StoredMarks(id=id_, held=True)


def changed_marks(
    old: StoredMarks,
    *,
    hold: bool | None = None,
    reason: str | None = None,
    tags: Iterable[str] | None = None,
    hold_uid: int | None = None,
) -> StoredMarks:
    """Return ``old`` with the given marks changed; see `Writer.set_marks`."""
    held = old.held if hold is None else hold
    kept_reason = old.hold_reason if reason is None else reason
    # A new hold without a uid is that of the repository's owner, not of the user who held the snapshot before.
    kept_uid: int | msgspec.UnsetType = old.hold_uid if hold is None else msgspec.UNSET
    return StoredMarks(
        id=old.id,
        held=held,
        hold_reason=kept_reason if held else "",
        tags=old.tags if tags is None else tuple(dict.fromkeys(tags)),
        hold_uid=(kept_uid if hold_uid is None else hold_uid) if held else msgspec.UNSET,
    )
