"""Limits of the connections of one socket.

For each user, and the choice of a connection to close when all are in use. No I/O.

Guarantees: one user never keeps another out, however many connections it opens; while all connections are in
use, users that are known to the daemon (root, owners of roots, users with a watched trainer) have precedence
over others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

ROOT = 0


class OpenConnection(NamedTuple):
    """Connection, as far as the choice depends on it."""

    number: int
    """Number that ascends with the time of arrival."""
    uid: int
    silent: bool
    """True if no message has come on it, so that no request is lost when it is closed."""


class ConnectionLimits:
    """Limits of one socket."""

    def __init__(self, max_connections: int, max_of_a_user: int) -> None:
        self._max_connections = max_connections
        self._max_of_a_user = max_of_a_user
        self.known: frozenset[int] = frozenset()
        """Users with precedence."""

    def is_one_too_many(self, uid: int, counts: Counter[int]) -> bool:
        """Return whether this user has as many connections as one may have. Root has no limit of its own."""
        return uid != ROOT and counts[uid] >= self._max_of_a_user

    def victim(self, uid: int, counts: Counter[int], places: Iterable[OpenConnection]) -> int | None:
        """Return the number of the silent connection to close for a new one of `uid` on a full socket.

        Return None where there is none.

        It belongs to a user that is not known, where `uid` is known, or else to one that has more connections
        than `uid` would have. Of these it is the oldest of the user with the most connections.
        """
        rank = self._rank(uid)
        # Of users with the same precedence the other one has to have more than `uid` with its new connection:
        # otherwise two users would close each other's connections for ever.
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
        """Return whether all connections are in use."""
        return counts.total() >= self._max_connections

    def _rank(self, uid: int) -> int:
        """Return the precedence of a user: 0 root, 1 known users, 2 others."""
        return 0 if uid == ROOT else 1 if uid in self.known else 2
