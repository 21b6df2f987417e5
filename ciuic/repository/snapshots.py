"""Snapshots: which there are, what they are called, what is in them.

The files in snapshots/ are the truth and the catalogue in SQLite only a faster way to list them: a snapshot
is listed if and only if its file is there. Nothing here takes a lock or writes, so it works on read-only
media and beside a writer.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator

from ciuic.errors import CiuicError, NotFound
from ciuic.repository import log
from ciuic.repository.catalogue import Catalogue, info_of
from ciuic.repository.config import read_file
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.ids import new_snapshot_id
from ciuic.repository.index import INDEX_NAME, MARKS_SEEN, SNAPSHOTS_SEEN, Index
from ciuic.repository.model import SnapshotInfo, UnreadableSnapshot
from ciuic.repository.promised import lost, promised_names
from ciuic.repository.resolve import resolve
from ciuic.repository.seen import changed_ns
from ciuic.types import Snapshot, SnapshotId, is_safety

SNAPSHOTS_DIR = "snapshots"
MARKS_DIR = "marks"
UNREADABLE_MARKS = "its marks file is damaged, so it counts as held"
_NAME = re.compile(r"cs-[0-9a-f]{6,32}\Z")
_FEW = 8
_Infos = list[SnapshotInfo]  # inside the class `list` is the method
_Ids = list[SnapshotId]
_Texts = list[str]
_Snapshots = list[Snapshot]
_Unreadables = list[UnreadableSnapshot]


class SnapshotStore:
    """The committed snapshots of one repository."""

    def __init__(self, directory: str, repository_id: str) -> None:
        self._directory = directory
        self._repository_id = repository_id

    def path(self, id_: str) -> str:
        return f"{self._directory}/{SNAPSHOTS_DIR}/{id_}"

    def marks_path(self, id_: str) -> str:
        return f"{self._directory}/{MARKS_DIR}/{id_}"

    def names(self) -> set[str]:
        """Ids of all snapshot files, readable or not."""
        return set(filter(_NAME.match, os.listdir(f"{self._directory}/{SNAPSHOTS_DIR}")))

    def ids(self) -> _Ids:
        """All, newest first."""
        return [info.id for info in self.list()]

    def list(
        self,
        *,
        root: bytes | None = None,
        tag: str | None = None,
        since_ns: int | None = None,
        until_ns: int | None = None,
        limit: int | None = None,
        safety: bool = True,
    ) -> _Infos:
        """Newest first; ``since_ns`` and ``until_ns`` inclusive. A few milliseconds for 1,000 snapshots.

        ``safety`` False leaves safety snapshots out.

        A snapshot that the catalogue does not know and whose file cannot be read is left out; `unreadable`
        names it.
        """
        infos = self._all()
        infos.sort(key=lambda info: (-info.time_ns, info.id))
        chosen = [
            info
            for info in infos
            if (root is None or root in info.roots)
            and (tag is None or tag in info.tags)
            and (since_ns is None or info.time_ns >= since_ns)
            and (until_ns is None or info.time_ns <= until_ns)
            and (safety or not is_safety(info.tags, info.message))
        ]
        return chosen if limit is None else chosen[: max(0, limit)]

    def info(self, id_: SnapshotId) -> SnapshotInfo:
        """One line of `list`. NotFound, DamagedSnapshot."""
        return info_of(self.load(id_))

    def load(self, id_: SnapshotId) -> Snapshot:
        """The snapshot with its marks applied. NotFound; DamagedSnapshot; UnsupportedFormat.

        Marks that cannot be read count as held: damage must never lead to deletion.
        """
        from ciuic.repository import snapformat

        try:
            data = read_file(self.path(id_))
        except FileNotFoundError:
            raise NotFound(f"there is no snapshot {id_}", hint="ciuic list shows those there are.") from None
        except OSError as error:
            raise DamagedSnapshot(id_, f"its file cannot be read: {error.strerror}") from None
        stored = snapformat.decode_snapshot(id_, data, self._repository_id)
        marks = snapformat.Marks(id=id_)
        try:
            marks = snapformat.decode_marks(id_, read_file(self.marks_path(id_)))
        except FileNotFoundError:
            pass  # most snapshots were never marked
        except (DamagedSnapshot, UnsupportedFormat, OSError) as error:
            log.warning("marks_unreadable", snapshot=id_, error=str(error))
            marks = snapformat.Marks(id=id_, held=True, hold_reason=UNREADABLE_MARKS)
        return snapformat.apply_marks(stored, marks)

    def latest(self, root: bytes | None = None) -> SnapshotInfo | None:
        """The newest one (that has this root)."""
        return next(self.newest_first(root), None)

    def newest_first(self, root: bytes | None = None) -> Iterator[SnapshotInfo]:
        """As `list`, for who needs only the first: where the catalogue is known to be as the files are, no more of it is read
        than that. What it yields may be gone when it is loaded, as with `list`."""
        given = set()
        for info in self._newest_catalogued():
            if root is None or root in info.roots:
                given.add(info.id)
                yield info
        for info in self.list(root=root):
            if info.id not in given:
                yield info

    def _newest_catalogued(self) -> _Infos:
        seen = {
            SNAPSHOTS_SEEN: changed_ns(f"{self._directory}/{SNAPSHOTS_DIR}"),
            MARKS_SEEN: changed_ns(f"{self._directory}/{MARKS_DIR}"),
        }
        try:
            index = Index.open(f"{self._directory}/{INDEX_NAME}", "read")
        except sqlite3.Error:
            return []
        try:
            if any(index.fact(name) != changed for name, changed in seen.items()):
                return []
            return [info for info, _ in Catalogue(index).rows(newest=_FEW)]
        except (sqlite3.Error, ValueError, TypeError) as error:
            log.warning("catalogue_unreadable", error=str(error))
            return []
        finally:
            index.close()

    def resolve(self, text: str) -> SnapshotId:
        """The snapshot meant by an id, an unambiguous prefix (with or without cs-), `latest`, `latest~N` or a
        time.

        A time is local unless it carries an offset: "2023-06-15 15:00" or RFC 3339; the newest snapshot not
        after it, where seconds count whole; a date alone means the end of that day. Safety snapshots are found
        by id alone: what a restore replaced is not the newest state that anybody wants back. NotFound; UsageError
        when ambiguous.
        """
        names = self.names()
        if text in names:  # also when its file is damaged: who asks for it must be told that
            return SnapshotId.parse(text)
        try:
            return resolve(text, names, lambda: self.list(safety=False))
        except NotFound:
            self._refuse_lost(text)
            raise

    def _refuse_lost(self, text: str) -> None:
        """Raise NotFound with the reason where ``text`` is the id of a snapshot that was promised and given up."""
        for promise in lost(self._directory, ()):
            if text in (promise.id, promise.id.removeprefix("cs-")):
                raise NotFound(
                    f"the snapshot {promise.id} was lost: {promise.reason}",
                    hint=f"ciuic list shows those there are; ciuic forget {promise.id} ends its mention there",
                )

    def unreadable(self) -> _Unreadables:
        """Files in snapshots/ that cannot be read, found by reading them all. Never raises for their content.

        Names that are no snapshot ids are reported too, temporary files (*.tmp) excepted.
        """
        return self.load_all()[1]

    def load_all(self) -> tuple[_Snapshots, _Unreadables]:
        """Every snapshot from its own file, newest first, and what `unreadable` returns: each file is read once."""
        loaded, unreadable = [], []
        for name in sorted(os.listdir(f"{self._directory}/{SNAPSHOTS_DIR}")):
            if name.endswith(".tmp"):
                continue
            try:
                loaded.append(self.load(SnapshotId.parse(name)))
            except NotFound:
                continue  # removed meanwhile
            except (CiuicError, ValueError) as error:
                unreadable.append(UnreadableSnapshot(name, self.path(name), str(error)))
        loaded.sort(key=lambda snapshot: (-snapshot.time_ns, snapshot.id))
        return loaded, unreadable

    def state(self) -> tuple[object, ...]:
        """Equal for as long as no snapshot and no mark came, went or was replaced. Reads none of them."""
        times = [os.stat(f"{self._directory}/{name}").st_mtime_ns for name in (SNAPSHOTS_DIR, MARKS_DIR)]
        return frozenset(self.names()), tuple(sorted(self.signatures().items())), *times

    def new_id(self, taken: Collection[str] = ()) -> SnapshotId:
        """A fresh id, neither in use nor promised nor in ``taken`` (cut but not yet committed)."""
        return new_snapshot_id(self.names().union(taken, promised_names(self._directory)))

    def signatures(self) -> dict[str, str]:
        """What tells each marks file from an earlier one of the same snapshot."""
        signatures = {}
        with os.scandir(f"{self._directory}/{MARKS_DIR}") as found:
            for item in found:
                if _NAME.match(item.name):
                    try:
                        facts = item.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # removed meanwhile, with its snapshot
                    signatures[item.name] = f"{facts.st_ino}-{facts.st_mtime_ns}-{facts.st_size}"
        return signatures

    def _all(self) -> _Infos:
        names = self.names()
        signatures = self.signatures()
        infos = {
            info.id: info
            for info, signature in self._catalogued()
            if info.id in names and signature == signatures.get(info.id, "")
        }
        for info in self.read_infos(names.difference(infos)):
            infos[info.id] = info
        return [*infos.values()]

    def read_infos(self, names: Iterable[str]) -> Iterable[SnapshotInfo]:
        """From the files themselves; unreadable ones are left out."""
        for name in names:
            try:
                yield info_of(self.load(SnapshotId.parse(name)))
            except NotFound:
                continue  # removed meanwhile
            except (DamagedSnapshot, UnsupportedFormat) as error:
                log.warning("snapshot_unreadable", snapshot=name, error=error.message)

    def catalogue_problems(self) -> _Texts:
        """Where the catalogue does not say what the snapshot files do, in words. Reads all of them."""
        problems = []
        for listed in self._all():
            try:
                if listed != self.info(listed.id):
                    problems.append(f"the catalogue does not say of {listed.id} what its file says")
            except (DamagedSnapshot, UnsupportedFormat, NotFound):
                continue  # an unreadable file is `unreadable`'s to name; one that is gone was removed meanwhile
        return problems

    def vanished(self) -> _Texts:
        """Files that the catalogue was made from and that are gone, in words; known until the next writer begins.

        A removal that was interrupted leaves such, and so does a file system that lost files: nothing else would
        tell that there was one.
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
            index = Index.open(f"{self._directory}/{INDEX_NAME}", "read")
        except sqlite3.Error:
            return ()
        try:
            return Catalogue(index).rows()
        except (sqlite3.Error, ValueError, TypeError) as error:
            log.warning("catalogue_unreadable", error=str(error))
            return ()
        finally:
            index.close()
