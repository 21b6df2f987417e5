"""The catalogue as a writer keeps it: brought into line with snapshots/ and marks/ when it opens, where they may be other than the
catalogue says, and with what the writer did when it closes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ciuic.repository import log
from ciuic.repository.index import MARKS_SEEN, SNAPSHOTS_SEEN
from ciuic.repository.model import SnapshotInfo
from ciuic.repository.seen import changed_ns, settled_ns
from ciuic.repository.snapformat import Marks, encode_marks
from ciuic.repository.snapshots import MARKS_DIR, SNAPSHOTS_DIR, SnapshotStore
from ciuic.repository.writerindex import WriterIndex
from ciuic.types import SnapshotId

if TYPE_CHECKING:
    from ciuic.repository.disk import Disk
    from ciuic.repository.packs import Packs

_CATALOGUED: Final = {SNAPSHOTS_SEEN: SNAPSHOTS_DIR, MARKS_SEEN: MARKS_DIR}


class Cataloguing:
    """For one writer. Never a reason to fail."""

    def __init__(self, disk: Disk, path: str, snapshots: SnapshotStore, index: WriterIndex) -> None:
        self._disk = disk
        self._path = path
        self._snapshots = snapshots
        self._index = index
        self.waiting: dict[str, tuple[SnapshotInfo, str]] = {}
        """Rows of snapshots made by this writer."""
        self.changed = False
        """Whether a snapshot or a mark came, went or was replaced by this writer."""

    def note_new_repository(self, packs: Packs) -> None:
        """Note that no snapshot is missing where there is nothing yet: what a first capture leaves is then known to be garbage."""
        if not self._index.last_pack() and not packs.numbers() and not self._snapshots.names():
            self._index.set_no_snapshots(holds=True)

    def before_commit(self) -> None:
        """Note that a repository without snapshots has lost some from now on: the first one is about to be committed."""
        self.changed = True
        self._index.set_no_snapshots(holds=False)

    def removed(self, ids: Iterable[SnapshotId]) -> None:
        """These snapshots were removed on purpose."""
        chosen = list(ids)
        self._index.catalogue_remove(chosen)
        for id_ in chosen:
            self.waiting.pop(id_, None)
        if not self._snapshots.names():
            self._index.set_no_snapshots(holds=True)

    def close(self) -> None:
        """Brings the catalogue up to date, and says that it is, for the next one who opens the repository."""
        if self.waiting:
            self._index.catalogue_put(self.waiting.values())
        if self.changed:
            for name, directory in _CATALOGUED.items():
                self._index.set_seen(name, settled_ns(f"{self._path}/{directory}", wait=True))

    def _bring_back_marks(self, ids: set[str]) -> None:
        """Writes again, from the catalogue, marks files that are gone although their snapshots are there.

        Nothing removes one alone, not even a release: without it the next prune would take what is held.
        """
        for info in self._index.catalogue_infos() if ids else ():
            if info.id in ids:
                marks = Marks(id=info.id, held=info.held, hold_reason=info.hold_reason, tags=info.tags)
                log.warning("marks_brought_back", snapshot=info.id, held=info.held)
                with suppress(OSError):  # a full disk: that must not keep this writer from freeing space
                    self._disk.replace_file(self._snapshots.marks_path(info.id), encode_marks(marks))

    def refresh(self) -> None:
        """Makes the catalogue say what snapshots/ and marks/ hold, and removes what a crash left there."""
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
                if name.endswith(".tmp"):
                    self._disk.unlink(f"{self._path}/{directory}/{name}")
        if unchanged:
            return
        snapshots = self._snapshots
        if snapshots.names():
            self._index.set_no_snapshots(holds=False)  # a power cut may have brought it back
        names, signatures, known = snapshots.names(), snapshots.signatures(), self._index.catalogued()
        gone = known.keys() - names
        if gone:
            self._index.catalogue_remove(gone)
        self._bring_back_marks({name for name in names - signatures.keys() if known.get(name)})
        signatures = snapshots.signatures()
        stale = {name for name in names if known.get(name) != signatures.get(name, "")}
        if stale:
            self._index.catalogue_put(
                [(info, signatures.get(info.id, "")) for info in snapshots.read_infos(stale)]
            )
        for name, found_ns in before.items():
            self._index.set_seen(name, found_ns)
