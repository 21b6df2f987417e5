"""Rules of a restore for names that exist already: what may be replaced, and what is believed to be right."""

from __future__ import annotations

import os
import stat

from ciuic.restore.model import Overwrite
from ciuic.types import Entry, recorded_time


class OverwriteRules:
    """Decisions of one overwrite mode. ``resumed``: the same restore was begun here before and cut short."""

    def __init__(self, mode: Overwrite | None, *, resumed: bool) -> None:
        self._mode = mode
        self._resumed = resumed

    def may_replace(self, entry: Entry, existing: os.stat_result) -> bool:
        """Return whether the mode allows to replace what exists."""
        if self._mode is Overwrite.IF_NEWER:
            return entry.mtime_ns > recorded_time(existing.st_mtime_ns)
        return self._mode in (Overwrite.ALWAYS, Overwrite.IF_CHANGED)

    def may_touch(self, entry: Entry, existing: os.stat_result) -> bool:
        """Return whether what exists may be replaced or given other attributes."""
        if self.may_replace(entry, existing):
            return True
        # Without a mode only the result of an earlier run may be there, which the plan did not report as a conflict.
        return self._mode is None and self._resumed and believed_equal(entry, existing)

    def believes_content(self, entry: Entry, existing: os.stat_result) -> bool:
        """Return whether what exists is believed to have the right content, without reading it."""
        # A resumed run has set these times itself, after the content was whole and synced.
        believes = self._mode is Overwrite.IF_CHANGED or self._resumed
        return believes and believed_equal(entry, existing)

    def sets_directory_attributes(self, entry: Entry, existing: os.stat_result) -> bool:
        """Return whether an existing directory gets the recorded attributes."""
        if self._mode is Overwrite.NEVER:
            return False
        return self._mode is not Overwrite.IF_NEWER or entry.mtime_ns > recorded_time(existing.st_mtime_ns)


def believed_equal(entry: Entry, existing: os.stat_result) -> bool:
    """Return whether type, size and modification time are the same, to the nanosecond, as a restore sets it."""
    return (
        stat.S_IFMT(entry.mode) == stat.S_IFMT(existing.st_mode)
        and entry.mtime_ns == recorded_time(existing.st_mtime_ns)
        and (not entry.is_file or entry.size_bytes == existing.st_size)
    )
