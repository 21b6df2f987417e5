"""Whose connections a socket has room for: limits for each user, and who goes when all places are taken. No I/O.

Guarantees: one user never keeps another out, however many connections it opens; while all places are taken, users that are known to
the daemon (root, owners of roots, users with a trainer that is watched) go before those that are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

ROOT = 0


class Place(NamedTuple):
    """One connection, for the decision which one has to go."""

    number: int
    """Ascends with the time of arrival."""
    uid: int
    silent: bool
    """It has not said anything yet, so nothing is lost with it but a connection."""


class Places:
    """The limits of one socket."""

    def __init__(self, max_connections: int, max_of_a_user: int) -> None:
        self._max_connections = max_connections
        self._max_of_a_user = max_of_a_user
        self.known: frozenset[int] = frozenset()
        """Users that go first."""

    def is_one_too_many(self, uid: int, counts: Counter[int]) -> bool:
        """Return whether this user has used up its own places. Root has no limit of its own."""
        return uid != ROOT and counts[uid] >= self._max_of_a_user

    def victim(self, uid: int, counts: Counter[int], places: Iterable[Place]) -> int | None:
        """Return the number of the silent connection that makes room for ``uid`` on a full socket; None where nothing should go.

        It is one of a user that is not known, where ``uid`` is known, or else of one that has more connections than ``uid`` would
        have: those of the user with the most, the oldest first.
        """
        rank = self._rank(uid)
        candidates = [
            place
            for place in places
            if place.silent
            and (
                self._rank(place.uid) > rank
                or (self._rank(place.uid) == rank and counts[place.uid] > counts[uid] + 1)
            )
        ]
        if not candidates:
            return None
        chosen = max(candidates, key=lambda place: (self._rank(place.uid), counts[place.uid], -place.number))
        return chosen.number

    def is_full(self, counts: Counter[int]) -> bool:
        return counts.total() >= self._max_connections

    def _rank(self, uid: int) -> int:
        """Who goes first: 0 root, 1 known users, 2 everybody else."""
        return 0 if uid == ROOT else 1 if uid in self.known else 2
