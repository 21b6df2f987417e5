"""Snapshots of a writer: records of snapshot and marks files, and their catalogue, made to agree with them at open and close.

The catalogue is read from the files again only where they may differ from it. Records are pure functions of a draft, or of the
old marks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from ciuic.errors import CiuicError
from ciuic.repository import log
from ciuic.repository.config import read_file
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.format.snapshot_format import StoredMarks, decode_marks, encode_marks
from ciuic.repository.index.database import MARKS_SEEN, SNAPSHOTS_SEEN, changed_ns, settled_ns
from ciuic.repository.index.writer_index import WriterIndex
from ciuic.repository.model import SnapshotInfo
from ciuic.repository.snapshots import MARKS_DIR, SNAPSHOTS_DIR, SnapshotStore
from ciuic.types import Snapshot, SnapshotDraft, SnapshotId

if TYPE_CHECKING:
    from ciuic.repository.disk.operations import Disk
    from ciuic.repository.packs.pack_directory import Packs


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


_CATALOGUED: Final = {SNAPSHOTS_SEEN: SNAPSHOTS_DIR, MARKS_SEEN: MARKS_DIR}


class WriterCatalogue:
    """Catalogue of one writer; an error in it is never a reason to fail."""

    def __init__(self, disk: Disk, path: str, snapshots: SnapshotStore, index: WriterIndex) -> None:
        self._disk = disk
        self._path = path
        self._snapshots = snapshots
        self._index = index
        self.waiting: dict[str, tuple[SnapshotInfo, str]] = {}
        """Rows of snapshots made by this writer."""
        self._newest_ns = -1
        """Place of the last snapshot in the order of commits; -1: not looked up yet."""
        self.changed = False
        """True if this writer added, removed or replaced a snapshot or a mark."""

    def note_new_repository(self, packs: Packs) -> None:
        """Record that no snapshot is missing while there is nothing yet.

        Leftovers of a first capture are then known as garbage.
        """
        # A number that the index remembers means that there were packs, and so perhaps snapshots.
        if not self._index.last_pack() and not packs.numbers() and not self._snapshots.names():
            self._index.set_no_snapshots(holds=True)

    def place_of(self, draft: SnapshotDraft) -> int:
        """Return the place of a new snapshot in the order of commits; 0: that of its time."""
        if self._newest_ns < 0:
            newest = self._snapshots.latest()
            self._newest_ns = 0 if newest is None else newest.order_ns
        placed_ns = place_in_order(
            draft.time_ns,
            now_ns=time.time_ns(),
            newest_ns=self._newest_ns,
            parent_ns=self._order_of(draft.parent),
        )
        self._newest_ns = max(self._newest_ns, placed_ns, draft.time_ns)
        return placed_ns

    def _order_of(self, parent: str) -> int:
        """Return the place of a draft's parent; -1 where there is none, or it cannot be read."""
        try:
            return self._snapshots.load(SnapshotId.parse(parent)).order_ns if parent else -1
        except (CiuicError, ValueError):
            return -1

    def before_commit(self) -> None:
        """Record that snapshots may be missing from now on: the first one is about to be committed."""
        self.changed = True
        self._index.set_no_snapshots(holds=False)

    def removed(self, ids: Iterable[SnapshotId]) -> None:
        """Remove the rows of snapshots that were removed on purpose."""
        chosen = list(ids)
        self._index.catalogue_remove(chosen)
        for id_ in chosen:
            self.waiting.pop(id_, None)
        if not self._snapshots.names():
            self._index.set_no_snapshots(holds=True)

    def close(self) -> None:
        """Write the catalogue, and record that it matches the files, for the next writer or reader."""
        if self.waiting:
            self._index.catalogue_put(self.waiting.values())
        if self.changed:
            for name, directory in _CATALOGUED.items():
                # Up to 10 ms of waiting cost nobody anything here: the snapshot was reported at commit.
                self._index.set_seen(name, settled_ns(f"{self._path}/{directory}", wait=True))

    def _restore_marks(self, ids: set[str]) -> None:
        """Restore, from the catalogue, marks files that are gone although their snapshots are there.

        Nothing deletes one alone, not even a release: without it the next prune would remove a held snapshot.
        """
        for info in self._index.catalogue_infos() if ids else ():
            if info.id in ids:
                marks = StoredMarks(id=info.id, held=info.held, hold_reason=info.hold_reason, tags=info.tags)
                log.warning("marks_brought_back", snapshot=info.id, held=info.held)
                # A full disk must not keep this writer from freeing space.
                with suppress(OSError):
                    self._disk.replace_file(self._snapshots.marks_path(info.id), encode_marks(marks))

    def refresh(self) -> None:
        """Make the catalogue agree with snapshots/ and marks/, and delete what a crash left there."""
        # Read before the directories, so that a change meanwhile makes the recorded time too old, never too
        # new.
        before = {
            name: settled_ns(f"{self._path}/{directory}", wait=False)
            for name, directory in _CATALOGUED.items()
        }
        unchanged = all(
            self._index.seen_ns(name) == changed_ns(f"{self._path}/{directory}")
            for name, directory in _CATALOGUED.items()
        )
        for directory in (".",) if unchanged else (".", *_CATALOGUED.values()):
            for name in os.listdir(f"{self._path}/{directory}"):
                # Left by a crash: the lock excludes a writer that is about to rename it.
                if name.endswith(".tmp"):
                    self._disk.unlink(f"{self._path}/{directory}/{name}")
        if unchanged:
            return
        snapshots = self._snapshots
        if snapshots.names():
            # A power cut may have restored an older fact.
            self._index.set_no_snapshots(holds=False)
        names, signatures, known = snapshots.names(), snapshots.signatures(), self._index.catalogued()
        gone = known.keys() - names
        if gone:
            self._index.catalogue_remove(gone)
        self._restore_marks({name for name in names - signatures.keys() if known.get(name)})
        signatures = snapshots.signatures()
        stale = {name for name in names if known.get(name) != signatures.get(name, "")}
        if stale:
            self._index.catalogue_put(
                [(info, signatures.get(info.id, "")) for info in snapshots.read_infos(stale)]
            )
        for name, found_ns in before.items():
            self._index.set_seen(name, found_ns)
