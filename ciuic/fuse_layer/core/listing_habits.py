"""Choice of directory listings that carry attributes: those for processes that look up the entries that they list.

A program such as find or rsync lists a directory and then looks at each entry, which costs a request each. A
reply to READDIRPLUS may carry the attributes of entries, and the kernel asks for none of those again. For
programs that want names alone (os.listdir, a shell's glob) they would be read for nothing, and be remembered
by the kernel and by the worker. The kernel's own choice (FUSE_READDIRPLUS_AUTO) asks for attributes in the
first reply of a directory alone, because it sees the first lookup only when find has read the whole
directory: 80,610 requests for 100,000 files in 100 directories. Without it every request is READDIRPLUS, and
the choice is made here, from the process's lookups after its last listings.

Guarantees: the choice affects the attributes that are sent along, never the names; memory is bounded. There
is no lock: two threads at the same time may miscount, which costs a request more or less.
"""

from __future__ import annotations

from typing import Final

MIN_LOOKED_UP: Final = 16
"""Entries of one directory that a process looks up before its listings carry attributes."""
BELIEVED_LISTINGS: Final = 64
"""Number of further directories that are listed with attributes. The choice is made anew then, because a
process that gets attributes looks nothing up any more."""
MAX_PROCESSES: Final = 256
"""Limit of processes that are remembered."""


class _Habit:
    __slots__ = ("believed", "directory", "looked_up")

    def __init__(self) -> None:
        self.directory = 0
        """Node of the directory that was listed last."""
        self.looked_up = 0
        """Number of its entries that were looked up since."""
        self.believed = 0
        """Number of directories still to be listed with attributes."""


class ListingHabits:
    """Habits of the processes that use one mount."""

    def __init__(self) -> None:
        self._by_pid: dict[int, _Habit] = {}

    def wants_attributes(self, pid: int, directory: int, *, from_start: bool) -> bool:
        """Return whether the next names of a listing are to come with attributes.

        The first reply of each directory has them, as with the kernel's own choice: small directories fit
        into it.
        """
        habit = self._by_pid.get(pid)
        if habit is None:
            if len(self._by_pid) >= MAX_PROCESSES:
                # Most of them have ended; the others are known again after one directory.
                self._by_pid.clear()
            habit = self._by_pid[pid] = _Habit()
        if habit.looked_up >= MIN_LOOKED_UP:
            habit.believed = BELIEVED_LISTINGS
        elif from_start and habit.believed:
            habit.believed -= 1
        if from_start:
            habit.directory, habit.looked_up = directory, 0
        return from_start or habit.believed > 0

    def looked_up(self, pid: int, directory: int) -> None:
        """Note that a process looked up an entry of a directory."""
        habit = self._by_pid.get(pid)
        if habit is not None and habit.directory == directory:
            habit.looked_up += 1
