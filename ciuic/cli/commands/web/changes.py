"""Bytes written and deleted lately, by directory: the engine of `ciuic changed`, and a treemap of it.

Guarantees: no more than so many changed paths are counted; what was counted between two snapshots is not counted again while it is among the last
`_MAX_KEPT` answers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from ciuic.cli.commands.web.charts import Rectangle, treemap
from ciuic.cli.commands.web.reading import Reading
from ciuic.errors import Damaged, NotFound
from ciuic.history import DirectoryChanges, RootChanges, Timeline, changes_since
from ciuic.printable import one_line
from ciuic.repository import SnapshotInfo
from ciuic.types import Snapshot
from ciuic.units import human_size

WINDOWS: Final = {
    "1h": ("the last hour", 3600),
    "1d": ("the last day", 86_400),
    "1w": ("the last week", 604_800),
}
MAX_PATHS: Final = 50_000
"""Changed paths of a root that the page counts: a second or two."""
MAX_PATHS_OF_OVERVIEW: Final = 5000
MAX_DIRECTORIES: Final = 500
_MAX_TILES: Final = 24
_MAX_KEPT: Final = 64
_LETTER: Final = 6.6
"""Width of a letter of a label."""


class ChangeCounts:
    """Answers that are kept. Used by all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str, str, int], RootChanges] = {}

    def since(self, reading: Reading, since_ns: int, most: int) -> tuple[list[RootChanges], int]:
        """Return the changes of each root that has some, and the number of roots that cannot be read."""
        found, damaged = [], 0
        by_root: dict[tuple[str, str], list[SnapshotInfo]] = {}
        for info in reading.infos:
            for path in info.roots:
                by_root.setdefault((os.fsdecode(path), info.host), []).append(info)
        for (root, host), infos in sorted(by_root.items()):
            # As `changes_since` chooses them, but only these two are loaded.
            before = [info for info in infos if info.time_ns <= since_ns]
            new, old = infos[0], max(before, key=lambda info: info.time_ns, default=infos[-1])
            if new.id == old.id:
                continue
            key = str(old.id), str(new.id), root, most
            changes = self._kept.get(key)
            if changes is None:
                try:
                    changes = _counted(
                        reading,
                        Timeline(host, os.fsencode(root), [_load(reading, one) for one in (new, old)]),
                        since_ns,
                        most,
                    )
                except (Damaged, NotFound):
                    damaged += 1
                    continue
            if changes is not None:
                self._keep(key, changes)
                if changes.directories:
                    found.append(changes)
        return found, damaged

    def _keep(self, key: tuple[str, str, str, int], changes: RootChanges) -> None:
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = changes
            while len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]


def _load(reading: Reading, info: SnapshotInfo) -> Snapshot:
    return reading.session.repository_of(info.id).snapshots.load(info.id)


def _counted(reading: Reading, timeline: Timeline, since_ns: int, most: int) -> RootChanges | None:
    repository = reading.session.repository_of(*(snapshot.id for snapshot in timeline.snapshots))
    return changes_since(repository, timeline, since_ns, most=most)


class Row(NamedTuple):
    """Changes of a directory."""

    changes: RootChanges
    directory: DirectoryChanges

    @property
    def written_bytes(self) -> int:
        """Bytes of new and overwritten files."""
        return self.directory.added.size_bytes + self.directory.overwritten.size_bytes

    @property
    def bytes(self) -> int:
        """Bytes that were written or deleted."""
        return self.written_bytes + self.directory.deleted.size_bytes

    @property
    def files(self) -> int:
        """Files that were written or deleted."""
        return sum(total.files for total in self.directory[1:])


class Tile(NamedTuple):
    """A directory, or the rest of them, in the treemap."""

    row: Row | None
    """None for the rest."""
    title: str
    label: str
    """Text with room in the rectangle; empty where there is none."""
    place: Rectangle
    deleted_height: float
    """Height of the part that stands for what was deleted."""


class LatelyChanged(NamedTuple):
    """Changes in a window of time."""

    window: str
    words: str
    rows: list[Row]
    """Most bytes first."""
    tiles: list[Tile]
    height: int
    written_bytes: int
    deleted_bytes: int
    files: int
    is_partial: bool
    damaged: int


def lately_changed(
    counts: ChangeCounts, reading: Reading, window: str, *, most: int, height: int
) -> LatelyChanged:
    """Return what changed in a window of `WINDOWS`, the first one for another name, with a treemap of 1000 by so many units."""
    window = window if window in WINDOWS else "1h"
    words, seconds = WINDOWS[window]
    found, damaged = counts.since(reading, time.time_ns() - seconds * 10**9, most)
    rows = sorted((Row(one, directory) for one in found for directory in one.directories), key=_most_first)
    return LatelyChanged(
        window,
        words,
        rows,
        tiles(rows, height),
        height,
        sum(row.written_bytes for row in rows),
        sum(row.directory.deleted.size_bytes for row in rows),
        sum(row.files for row in rows),
        any(one.is_partial for one in found),
        damaged,
    )


def _most_first(row: Row) -> tuple[int, bytes]:
    return -row.bytes, row.directory.path


def tiles(rows: Sequence[Row], height: int) -> list[Tile]:
    """Return the tiles of the directories with most bytes, and one for the rest."""
    shown, rest = rows[: _MAX_TILES - 1], rows[_MAX_TILES - 1 :]
    parts = [(row, row.bytes, row.directory.deleted.size_bytes, _title(row)) for row in shown if row.bytes]
    total = sum(row.bytes for row in rest)
    made: list[tuple[Row | None, int, int, str]] = [*parts]
    if total:
        deleted = sum(row.directory.deleted.size_bytes for row in rest)
        made.append((None, total, deleted, f"{len(rest):,} more directories · {human_size(total)}"))
    made.sort(key=lambda part: -part[1])
    places = treemap([part[1] for part in made], 1000, height)
    return [
        Tile(row, title, _label(title, place), place, place.height * deleted / size)
        for (row, size, deleted, title), place in zip(made, places, strict=True)
    ]


def _title(row: Row) -> str:
    root = row.changes.root.rstrip(b"/").rpartition(b"/")[0]
    name = one_line(row.directory.path[len(root) :].lstrip(b"/") or b"/")
    new = f"{human_size(row.written_bytes)} written" if row.written_bytes else ""
    gone = (
        f"{human_size(row.directory.deleted.size_bytes)} deleted" if row.directory.deleted.size_bytes else ""
    )
    return f"{name}/ · {', '.join(part for part in (new, gone) if part)}"


def _label(title: str, place: Rectangle) -> str:
    room = int((place.width - 12) / _LETTER)
    if room < 6 or place.height < 22:
        return ""
    return title if len(title) <= room else f"{title[: room - 1]}…"
