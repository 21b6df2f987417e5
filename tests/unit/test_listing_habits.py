"""Attributes go with a listing to processes that look at what they list, and to no others."""

from __future__ import annotations

from ciuic.fuse_layer.listing_habits import (
    BELIEVED_LISTINGS,
    MAX_PROCESSES,
    MIN_LOOKED_UP,
    ListingHabits,
)

FIND, LS = 100, 200


def _listed(habits: ListingHabits, pid: int, directory: int) -> tuple[bool, bool]:
    """Whether the first and a later reply of a listing come with attributes."""
    first = habits.wants_attributes(pid, directory, from_start=True)
    return first, habits.wants_attributes(pid, directory, from_start=False)


def test_who_looks_everything_up_gets_attributes_from_then_on() -> None:
    """The first directory teaches it; a process that only lists never gets more than the first reply."""
    habits = ListingHabits()
    assert _listed(habits, FIND, 1) == (True, False)
    assert _listed(habits, LS, 1) == (True, False)
    for _ in range(MIN_LOOKED_UP):
        habits.looked_up(FIND, 1)
    assert _listed(habits, FIND, 2) == (True, True)
    assert _listed(habits, LS, 2) == (True, False)


def test_it_is_asked_again_after_a_while() -> None:
    """With attributes nothing is looked up any more, so belief ends, and one directory is enough to get it back."""
    habits = ListingHabits()
    habits.wants_attributes(FIND, 1, from_start=True)
    for _ in range(MIN_LOOKED_UP):
        habits.looked_up(FIND, 1)
    believed = [_listed(habits, FIND, directory)[1] for directory in range(2, BELIEVED_LISTINGS + 4)]
    assert believed.count(True) == BELIEVED_LISTINGS
    assert believed[-1] is False


def test_in_one_large_directory_it_is_learnt_on_the_way() -> None:
    """A program that looks up as it goes gets attributes with the next reply; lookups elsewhere do not count."""
    habits = ListingHabits()
    assert _listed(habits, FIND, 1) == (True, False)
    for _ in range(MIN_LOOKED_UP):
        habits.looked_up(FIND, 7)
    assert not habits.wants_attributes(FIND, 1, from_start=False)
    for _ in range(MIN_LOOKED_UP):
        habits.looked_up(FIND, 1)
    assert habits.wants_attributes(FIND, 1, from_start=False)


def test_many_processes_cost_no_memory() -> None:
    """The table is bounded however many processes come."""
    habits = ListingHabits()
    for pid in range(10 * MAX_PROCESSES):
        habits.wants_attributes(pid, 1, from_start=True)
    assert len(habits._by_pid) <= MAX_PROCESSES
