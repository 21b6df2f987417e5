"""Committed snapshots as files of a directory: names, catalogue lines, and the snapshots themselves.

The files in snapshots/ are the truth; the catalogue in SQLite is only a faster way to list them. A snapshot
is listed if and only if its file is there. Nothing here takes a lock or writes, so it works on read-only
media and beside a writer.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Collection, Iterable

from ciuic.errors import CiuicError, NotFound
from ciuic.repository import log, promised
from ciuic.repository.committed_snapshots import CommittedSnapshots
from ciuic.repository.config import read_file
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.index.catalogue import Catalogue, info_of
from ciuic.repository.index.database import INDEX_NAME, MARKS_SEEN, SNAPSHOTS_SEEN, IndexDatabase, changed_ns
from ciuic.repository.model import SnapshotInfo, UnreadableSnapshot
from ciuic.types import Snapshot, SnapshotId

SNAPSHOTS_DIR = "snapshots"
MARKS_DIR = "marks"
UNREADABLE_MARKS = "its marks file is damaged, so it counts as held"
_NAME = re.compile(r"cs-[0-9a-f]{6,32}\Z")
# Rows that `newest_first` reads: most callers need one.
_FEW = 8


class SnapshotStore(CommittedSnapshots):
    """Committed snapshots of one repository, as files of its directory."""

    def __init__(self, directory: str, repository_id: str) -> None:
        self._directory = directory
        self._repository_id = repository_id

    def path(self, id_: str) -> str:
        """Return the path of a snapshot file."""
        return f"{self._directory}/{SNAPSHOTS_DIR}/{id_}"

    def marks_path(self, id_: str) -> str:
        """Return the path of a marks file."""
        return f"{self._directory}/{MARKS_DIR}/{id_}"

    def names(self) -> set[str]:
        """Return the ids of all snapshot files, readable or not."""
        return set(filter(_NAME.match, os.listdir(f"{self._directory}/{SNAPSHOTS_DIR}")))

    def load(self, id_: SnapshotId) -> Snapshot:
        """Return the snapshot with its marks applied.

        Marks that cannot be read count as held: damage must never lead to deletion.

        Raises:
            NotFound: there is no such snapshot.
            DamagedSnapshot: the file is damaged.
            UnsupportedFormat: a later version of ciuic wrote it.
        """
        from ciuic.repository.format import snapshot_format

        try:
            data = read_file(self.path(id_))
        except FileNotFoundError:
            raise NotFound(f"there is no snapshot {id_}", hint="ciuic list shows those there are.") from None
        except OSError as error:
            raise DamagedSnapshot(id_, f"its file cannot be read: {error.strerror}") from None
        stored = snapshot_format.decode_snapshot(id_, data, self._repository_id)
        marks = snapshot_format.StoredMarks(id=id_)
        try:
            marks = snapshot_format.decode_marks(id_, read_file(self.marks_path(id_)))
        except FileNotFoundError:
            # Most snapshots were never marked.
            pass
        except (DamagedSnapshot, UnsupportedFormat, OSError) as error:
            log.warning("marks_unreadable", snapshot=id_, error=str(error))
            marks = snapshot_format.StoredMarks(id=id_, held=True, hold_reason=UNREADABLE_MARKS)
        return snapshot_format.apply_marks(stored, marks)

    def newest_known(self) -> list[SnapshotInfo]:
        """Return the newest rows of the catalogue if it is known to match the files, else []."""
        seen = {
            SNAPSHOTS_SEEN: changed_ns(f"{self._directory}/{SNAPSHOTS_DIR}"),
            MARKS_SEEN: changed_ns(f"{self._directory}/{MARKS_DIR}"),
        }
        try:
            index = IndexDatabase.open(f"{self._directory}/{INDEX_NAME}", "read")
        except sqlite3.Error:
            return []
        try:
            # A change in either directory that the catalogue has not seen may have brought a newer snapshot.
            if any(index.fact(name) != changed for name, changed in seen.items()):
                return []
            return [info for info, _ in Catalogue(index).rows(newest=_FEW)]
        except (sqlite3.Error, ValueError, TypeError) as error:
            log.warning("catalogue_unreadable", error=str(error))
            return []
        finally:
            index.close()

    def lost(self, text: str) -> NotFound | None:
        """Return the error with the reason if ``text`` is the id of a promised snapshot that was given up."""
        for promise in promised.lost(self._directory, ()):
            if text in (promise.id, promise.id.removeprefix("cs-")):
                return NotFound(
                    f"the snapshot {promise.id} was lost: {promise.reason}",
                    hint="ciuic list shows those there are; "
                    f"ciuic forget {promise.id} ends its mention there",
                )
        return None

    def load_all(self) -> tuple[list[Snapshot], list[UnreadableSnapshot]]:
        """Return every snapshot from its own file, newest first, and `unreadable`; each file is read once."""
        loaded, unreadable = [], []
        for name in sorted(os.listdir(f"{self._directory}/{SNAPSHOTS_DIR}")):
            if name.endswith(".tmp"):
                continue
            try:
                loaded.append(self.load(SnapshotId.parse(name)))
            except NotFound:
                # Removed meanwhile.
                continue
            except (CiuicError, ValueError) as error:
                unreadable.append(UnreadableSnapshot(name, self.path(name), str(error)))
        loaded.sort(key=lambda snapshot: (-snapshot.order_ns, snapshot.id))
        return loaded, unreadable

    def state(self) -> tuple[object, ...]:
        """Return a value that changes when a snapshot or mark comes, goes or is replaced.

        None of their files is read.
        """
        # The directories' times: a snapshot file that was replaced under its own name shows in nothing else.
        times = [os.stat(f"{self._directory}/{name}").st_mtime_ns for name in (SNAPSHOTS_DIR, MARKS_DIR)]
        return frozenset(self.names()), tuple(sorted(self.signatures().items())), *times

    def new_id(self, taken: Collection[str] = ()) -> SnapshotId:
        """Return a new id, neither in use nor promised nor in ``taken`` (cut but not yet committed)."""
        return super().new_id([*taken, *promised.promised_names(self._directory)])

    def signatures(self) -> dict[str, str]:
        """Return for each marks file what tells it from an earlier one of the same snapshot."""
        signatures = {}
        with os.scandir(f"{self._directory}/{MARKS_DIR}") as found:
            for item in found:
                if _NAME.match(item.name):
                    try:
                        facts = item.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        # Removed meanwhile, with its snapshot.
                        continue
                    # Marks files are replaced, never written in place, so a change shows in the inode number.
                    signatures[item.name] = f"{facts.st_ino}-{facts.st_mtime_ns}-{facts.st_size}"
        return signatures

    def infos(self) -> list[SnapshotInfo]:
        """Return all lines: from the catalogue where it matches the files, else from the files."""
        names = self.names()
        signatures = self.signatures()
        infos = {
            info.id: info
            for info, signature in self._catalogued()
            # A row counts only if it was made from the marks file that is there now.
            if info.id in names and signature == signatures.get(info.id, "")
        }
        for info in self.read_infos(names.difference(infos)):
            infos[info.id] = info
        return [*infos.values()]

    def read_infos(self, names: Iterable[str]) -> Iterable[SnapshotInfo]:
        """Yield the catalogue lines from the files themselves, without unreadable ones."""
        for name in names:
            try:
                yield info_of(self.load(SnapshotId.parse(name)))
            except NotFound:
                # Removed meanwhile.
                continue
            except (DamagedSnapshot, UnsupportedFormat) as error:
                log.warning("snapshot_unreadable", snapshot=name, error=error.message)

    def catalogue_problems(self) -> list[str]:
        """Return where the catalogue differs from the snapshot files, in words. Reads all of them."""
        problems = []
        for listed in self.infos():
            try:
                if listed != self.info(listed.id):
                    problems.append(f"the catalogue differs from the file of {listed.id}")
            except (DamagedSnapshot, UnsupportedFormat, NotFound):
                # `unreadable` names an unreadable file; a missing one was removed meanwhile.
                continue
        return problems

    def vanished(self) -> list[str]:
        """Return files that the catalogue was made from and that are gone, in words.

        They are known until the next writer begins. An interrupted removal leaves such, and so does a file
        system that lost files: nothing else would tell that there was one.
        """
        names, marked = self.names(), self.signatures()
        problems = []
        for info, signature in self._catalogued():
            if info.id not in names:
                problems.append(f"{self.path(info.id)} is gone, and the catalogue has it")
            elif signature and info.id not in marked:
                held = ", by which it was held" if info.held else ""
                problems.append(f"{self.marks_path(info.id)} is gone, and the catalogue has it{held}")
        return problems

    def _catalogued(self) -> Iterable[tuple[SnapshotInfo, str]]:
        try:
            index = IndexDatabase.open(f"{self._directory}/{INDEX_NAME}", "read")
        except sqlite3.Error:
            return ()
        try:
            return Catalogue(index).rows()
        except (sqlite3.Error, ValueError, TypeError) as error:
            log.warning("catalogue_unreadable", error=str(error))
            return ()
        finally:
            index.close()
