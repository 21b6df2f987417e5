"""Attributes are listed for processes that look up what they list, and for no others."""

from __future__ import annotations

from ciuic.fuse_layer.core.directories import BELIEVED_LISTINGS, MAX_PROCESSES, MIN_LOOKED_UP, ListingHabits

FIND, LS = 100, 200


def _listed(habits: ListingHabits, pid: int, directory: int) -> tuple[bool, bool]:
    """Return whether a listing is to be read anew, and whether its replies have attributes."""
    return habits.opens(pid, directory), habits.wants_attributes(pid)


def test_process_that_looks_everything_up_gets_attributes() -> None:
    """A process that looks everything up gets attributes after one directory, and another none."""
    habits = ListingHabits()
    assert _listed(habits, FIND, 1) == (False, False)
    assert _listed(habits, LS, 1) == (False, False)
    for _ in range(MIN_LOOKED_UP):
        habits.looked_up(FIND, 1)
    assert _listed(habits, FIND, 2) == (True, True)
    assert _listed(habits, LS, 2) == (False, False)


def test_use_of_attributes_is_checked_again() -> None:
    """Listings go without attributes again after a while, until one directory proves their use.

    With attributes nothing is looked up any more, so the table cannot learn that the process changed.
    """
    habits = ListingHabits()
    habits.opens(FIND, 1)
    for _ in range(MIN_LOOKED_UP):
        habits.looked_up(FIND, 1)
    believed = [_listed(habits, FIND, directory)[1] for directory in range(2, BELIEVED_LISTINGS + 4)]
    assert believed.count(True) == BELIEVED_LISTINGS
    assert believed[-1] is False


def test_lookups_in_one_large_directory_are_noticed() -> None:
    """A process that looks up entries of one large directory gets attributes with the next reply.

    Lookups elsewhere do not count.
    """
    habits = ListingHabits()
    assert _listed(habits, FIND, 1) == (False, False)
    for _ in range(MIN_LOOKED_UP):
        habits.looked_up(FIND, 7)
    assert not habits.wants_attributes(FIND)
    for _ in range(MIN_LOOKED_UP):
        habits.looked_up(FIND, 1)
    assert habits.wants_attributes(FIND)


def test_table_of_processes_is_bounded() -> None:
    """The table of processes is bounded."""
    habits = ListingHabits()
    for pid in range(10 * MAX_PROCESSES):
        habits.opens(pid, 1)
    assert len(habits._by_pid) <= MAX_PROCESSES
