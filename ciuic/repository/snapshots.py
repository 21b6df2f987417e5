"""Committed snapshots: list them, load them, find the newest, and resolve what a person names.

A person names a snapshot by an id, a prefix of one, `latest`, `latest~N`, a time, or as the member of a set
(`ciuic.repository.snapshot_sets`). `CommittedSnapshots` answers that, whatever keeps the snapshots; a source brings `names`, `infos`, `load`, `load_all` and `path`.

`SnapshotStore` keeps them as files of a directory. The files in snapshots/ are the truth; the catalogue in
SQLite is only a faster way to list them. A snapshot is listed if and only if its file is there. Nothing here
takes a lock or writes, so it works on read-only media and beside a writer.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator

from ciuic.errors import CiuicError, NotFound, UsageError
from ciuic.repository import log
from ciuic.repository.config import MAX_FILE_BYTES
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.identity import new_snapshot_id
from ciuic.repository.index_database import (
    INDEX_NAME,
    MARKS_SEEN,
    SNAPSHOTS_SEEN,
    Catalogue,
    IndexDatabase,
    changed_ns,
    info_of,
)
from ciuic.repository.model import SnapshotInfo, UnreadableSnapshot
from ciuic.repository.snapshot_sets import SnapshotSet, named_snapshot, parse_set_name, sets_of
from ciuic.system.disk import read_regular
from ciuic.times import parse_time
from ciuic.types import Snapshot, SnapshotId, is_safety, order_of

_LATEST = re.compile(r"latest(?:~(\d{1,9}))?\Z")
_PREFIX = re.compile(r"(?:cs-)?([0-9a-f]{1,32})\Z")
_HINT = "ciuic list shows those there are."


def resolve(text: str, names: Collection[str], infos: Callable[[], list[SnapshotInfo]]) -> SnapshotId:
    """Return the id that ``text`` names.

    Args:
        text: An id, a prefix of one, ``latest``, ``latest~N``, or a time.
        names: Ids of all snapshots.
        infos: Returns the catalogue, newest first; called only where ids are not enough.

    Raises:
        NotFound: no snapshot fits.
        UsageError: ``text`` is none of these, or a prefix of several ids.
    """
    latest = _LATEST.match(text)
    if latest:
        return _nth(text, infos(), int(latest[1] or 0))
    # Before times: digits alone, such as 2023, and the d of 2d are a prefix where there is such an id.
    prefix = _PREFIX.match(text)
    if prefix:
        found_by_prefix = _by_prefix(text, f"cs-{prefix[1]}", names)
        if found_by_prefix is not None:
            return found_by_prefix
    try:
        until_ns = parse_time(text, time.time_ns()).after_ns
    except UsageError as error:
        if prefix:
            raise NotFound(f"there is no snapshot {text}", hint=_HINT) from None
        raise UsageError(
            f"{text!r} is not a snapshot id, latest, latest~N or a time",
            hint=f"A time: {error.hint}. {_HINT}",
        ) from None
    # By the times that `list` shows: where the clock was set, they are not in the order of commits.
    found = max(
        (info for info in infos() if info.time_ns < until_ns), key=lambda info: info.time_ns, default=None
    )
    if found is not None:
        return found.id
    raise NotFound(f"there is no snapshot as old as {text}", hint=_HINT)


def _nth(text: str, infos: list[SnapshotInfo], back: int) -> SnapshotId:
    if not infos:
        raise NotFound(
            f"there is no snapshot yet, so {text} names none",
            hint="`ciuic snapshot --wait` takes one now; `ciuic status` shows when the next is due",
        )
    if back >= len(infos):
        raise NotFound(f"there is no snapshot {text}: there are only {len(infos)}", hint=_HINT)
    return infos[back].id


def _by_prefix(text: str, prefix: str, names: Collection[str]) -> SnapshotId | None:
    # First, because a whole id may also be the beginning of longer ones: ids have 6 digits or more.
    if prefix in names:
        return SnapshotId.parse(prefix)
    found = sorted(name for name in names if name.startswith(prefix))
    if len(found) > 1:
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise UsageError(f"{text} could be {shown}", hint="Give more digits.")
    return SnapshotId.parse(found[0]) if found else None


# Inside the class, `list` is the method.
_Infos = list[SnapshotInfo]
_Ids = list[SnapshotId]
_Texts = list[str]
_Snapshots = list[Snapshot]
_Unreadables = list[UnreadableSnapshot]
_Sets = list[SnapshotSet]


class CommittedSnapshots(ABC):
    """Committed snapshots of one repository."""

    @abstractmethod
    def names(self) -> set[str]:
        """Return the ids of all snapshots, readable or not."""

    @abstractmethod
    def infos(self) -> _Infos:
        """Return a line of `list` for each snapshot that can be read, in any order."""

    @abstractmethod
    def load(self, id_: SnapshotId) -> Snapshot:
        """Return the snapshot with its marks applied.

        Marks that cannot be read count as held: damage must never lead to deletion.

        Raises:
            NotFound: there is no such snapshot.
            DamagedSnapshot: what is stored of it is damaged.
            UnsupportedFormat: a later version of ciuic wrote it.
        """

    @abstractmethod
    def load_all(self) -> tuple[_Snapshots, _Unreadables]:
        """Return every snapshot, newest first, and `unreadable`; each is read once."""

    @abstractmethod
    def path(self, id_: str) -> str:
        """Return where the snapshot is stored, for messages."""

    def marks_path(self, id_: str) -> str:
        """Return where its marks are stored, for messages."""
        return self.path(id_)

    def newest_known(self) -> _Infos:
        """Return the newest snapshots, at least one and in the order of `list`; [] if finding them takes all."""
        return []

    def lost(self, text: str) -> NotFound | None:
        """Return the error with the reason if ``text`` is the id of a promised snapshot that was given up."""
        return None

    def state(self) -> tuple[object, ...]:
        """Return a value that changes when a snapshot or mark comes, goes or is replaced."""
        return (frozenset(self.names()),)

    def new_id(self, taken: Collection[str] = ()) -> SnapshotId:
        """Return a new id, neither in use nor in ``taken`` (cut but not yet committed)."""
        return new_snapshot_id(self.names().union(taken))

    def catalogue_problems(self) -> _Texts:
        """Return in words where a catalogue differs from what it was made from. Reads everything."""
        return []

    def vanished(self) -> _Texts:
        """Return in words what a catalogue was made from and is gone."""
        return []

    def ids(self) -> _Ids:
        """Return all ids, newest first."""
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
        """List snapshots, the last committed first; ``since_ns`` and ``until_ns`` inclusive.

        1,000 snapshots take a few milliseconds. ``safety`` False leaves safety snapshots out. One that cannot be
        read is left out; `unreadable` names it.
        """
        infos = self.infos()
        # The order that `newest_first` relies on.
        infos.sort(key=order_of, reverse=True)
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
        """Return one line of `list`.

        Raises:
            NotFound: there is no such snapshot.
            DamagedSnapshot: the file is damaged.
        """
        return info_of(self.load(id_))

    def latest(self, root: bytes | None = None) -> SnapshotInfo | None:
        """Return the newest snapshot, or the newest that has ``root``."""
        return next(self.newest_first(root), None)

    def newest_first(self, root: bytes | None = None) -> Iterator[SnapshotInfo]:
        """Yield the snapshots in the order of `list`, for a caller that needs only the first few.

        Only `newest_known` is read at first. A snapshot may be gone when the caller loads it, as with `list`.
        """
        given = set()
        # Finding the base of a capture among 1,000 snapshots takes 0.6 ms so; with all rows it took 8.
        for info in self.newest_known():
            if root is None or root in info.roots:
                given.add(info.id)
                yield info
        for info in self.list(root=root):
            if info.id not in given:
                yield info

    def resolve(self, text: str, root: bytes | None = None) -> SnapshotId:
        """Return the id of the snapshot that ``text`` names.

        ``text`` is an id, an unambiguous prefix (with or without cs-), `latest`, `latest~N` or a time,
        as `ciuic.times` reads it ("2h", "14:05", "2023-06-15 15:00"). It names the newest snapshot not
        after it, where seconds count whole; a date alone means the end of that day. Safety snapshots are
        found by id alone: what a restore replaced is not the newest state that anybody wants back. With
        ``root`` the names that are no ids mean snapshots that have this root. ``MEMBER/set:NAME`` is the
        snapshot of a member of a set, ``set:NAME`` that of the only member here.

        Raises:
            NotFound: no snapshot fits, or it was promised and lost.
            UsageError: ``text`` is ambiguous.
        """
        names = self.names()
        # Also if its file is damaged: the caller must be told that.
        if text in names:
            return SnapshotId.parse(text)
        if (of_set := self._resolve_of_set(text)) is not None:
            return of_set
        try:
            return resolve(text, names, lambda: self.list(root=root, safety=False))
        except NotFound as error:
            raise self.lost(text) or error from None

    def _resolve_of_set(self, text: str) -> SnapshotId | None:
        """Return the id of the member of a set that ``text`` names; None if it names no set."""
        named = parse_set_name(text)
        return None if named is None else named_snapshot(named, self.sets()).id

    def sets(self) -> _Sets:
        """Return the sets of which snapshots are here, newest first. Reads all snapshots."""
        return sets_of(self.load_all()[0])

    def unreadable(self) -> _Unreadables:
        """Return the snapshots that cannot be read; reads them all. Never raises for their content."""
        return self.load_all()[1]


SNAPSHOTS_DIR = "snapshots"
MARKS_DIR = "marks"
VERDICTS_DIR = "verdicts"
"""Directory of what `ciuic.verdicts.records` writes; whether it is there can be asked without importing that."""
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
        from ciuic.repository import snapshot_format

        try:
            data = read_regular(self.path(id_), MAX_FILE_BYTES)
        except FileNotFoundError:
            raise NotFound(f"there is no snapshot {id_}", hint="ciuic list shows those there are.") from None
        except OSError as error:
            raise DamagedSnapshot(id_, f"its file cannot be read: {error.strerror}") from None
        stored = snapshot_format.decode_snapshot(id_, data, self._repository_id)
        marks = snapshot_format.StoredMarks(id=id_)
        try:
            marks = snapshot_format.decode_marks(id_, read_regular(self.marks_path(id_), MAX_FILE_BYTES))
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
        # Imported here, as below: promises are asked for what is not found, and before a snapshot is made.
        from ciuic.repository import promised

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
        loaded.sort(key=order_of, reverse=True)
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
        from ciuic.repository import promised

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
