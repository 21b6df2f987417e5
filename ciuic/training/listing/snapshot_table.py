"""`SnapshotTable`: the snapshots of a training as a list that prints as a table, also in notebooks."""

from __future__ import annotations

import time
from typing import Final, SupportsIndex, overload

from ciuic.training.format.reading import SavedSnapshot
from ciuic.training.util.text_table import aligned_text, html_table
from ciuic.units import human_size

_HEADERS: Final = ("id", "time", "step", "epoch", "metrics", "size", "new", "tags")
_NUMERIC: Final = ("step", "epoch", "size", "new")
_EMPTY: Final = "no snapshots"
# On every snapshot of a training, so it tells nothing.
_EVERYWHERE: Final = "training"


class SnapshotTable(list[SavedSnapshot]):
    """Snapshots, newest first. Does not change when snapshots come and go; slices are tables.

    Text and HTML show the newest 60. Times are local. ``size`` is that of the state, ``new`` the growth of the
    repository.
    """

    @overload
    def __getitem__(self, at: SupportsIndex) -> SavedSnapshot: ...

    @overload
    def __getitem__(self, at: slice) -> SnapshotTable: ...

    def __getitem__(self, at: SupportsIndex | slice) -> SavedSnapshot | SnapshotTable:
        found = super().__getitem__(at)
        return SnapshotTable(found) if isinstance(found, list) else found

    def __repr__(self) -> str:
        if not self:
            return _EMPTY
        return aligned_text(_HEADERS, [_row(one) for one in self], _NUMERIC, "earlier")

    def _repr_html_(self) -> str:
        """Return the table for a notebook; everything from the repository is escaped."""
        if not self:
            return f"<p>{_EMPTY}</p>"
        return html_table(_HEADERS, [_row(one) for one in self], _NUMERIC, "earlier")


def _row(saved: SavedSnapshot) -> list[str]:
    facts = saved.facts
    return [
        saved.id,
        _clock(saved.time_ns),
        "" if facts.step is None else str(facts.step),
        "" if facts.epoch is None else str(facts.epoch),
        ", ".join(f"{name} {value:.4g}" for name, value in facts.metrics.items()),
        human_size(saved.size_bytes),
        human_size(saved.new_bytes),
        ", ".join([*(["held"] if saved.held else []), *(tag for tag in saved.tags if tag != _EVERYWHERE)]),
    ]


def _clock(time_ns: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns // 10**9))
    # A crafted snapshot may have any time.
    except (OverflowError, ValueError, OSError):
        return "?"
