"""Limits of snapshots that are held for ordinary users.

In number, as the repository has them, and by the hour.

A hold keeps a snapshot from retention, so each costs the repository's disk for as long as it stands.
Administrators have no limit. Guarantees: the number counts across daemons, because the repository records for
whom each hold is; the rate counts in one daemon's life. A refused hold costs the user no snapshot: the
snapshot is taken and not held.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

import trio

from ciuic.config import HoldsConfig
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import PendingRecord
from ciuic.errors import CiuicError
from ciuic.units import plural

HOUR_SECONDS: Final = 3600.0
# Users whose rate is remembered: users in a container are created at no cost, and must not fill the memory.
MAX_USERS: Final = 1024


class UserHolds:
    """Limits of one daemon. Belongs to the trio thread."""

    def __init__(
        self,
        limits: Callable[[], HoldsConfig],
        store: Callable[[], Store],
        pending: Callable[[], Iterable[PendingRecord]],
    ) -> None:
        self._limits = limits
        self._store = store
        self._pending = pending
        # Times of holds granted within the last hour, by user.
        self._asked: dict[int, deque[float]] = {}
        # Holds granted to each user for snapshots that are not cut yet.
        self._under_way: Counter[int] = Counter()

    async def refusal(self, uid: int) -> str:
        """Return why this user gets no further hold now; empty when it gets one, which counts from now on.

        After an empty answer call `settled` when the snapshot is cut or will not be.
        """
        limits = self._limits()
        recent = self._recent(uid)
        if len(recent) >= limits.max_of_a_user_per_hour:
            return f"it is not held: user {uid} has had {len(recent)} held within the hour"
        # Both before the await: further requests of this user meanwhile must see this one.
        recent.append(trio.current_time())
        self._under_way[uid] += 1
        try:
            held = await trio.to_thread.run_sync(self._store().held_for, uid)
        except CiuicError:
            held = frozenset()  # the repository cannot be read, so nothing can be committed to it either
        # A union of ids: a snapshot that was committed just now may be in both.
        held |= {record.id for record in self._pending() if record.hold and record.user == uid}
        if len(held) + self._under_way[uid] > limits.max_of_a_user:
            recent.pop()
            self.settled(uid)
            return f"it is not held: {plural(len(held), 'snapshot is', 'snapshots are')} held for user {uid} already"
        return ""

    def settled(self, uid: int) -> None:
        """Report that the snapshot of a granted hold is pending now, or was not cut."""
        self._under_way[uid] -= 1
        if not self._under_way[uid]:
            del self._under_way[uid]

    def _recent(self, uid: int) -> deque[float]:
        since = trio.current_time() - HOUR_SECONDS
        recent = self._asked.setdefault(uid, deque())
        while recent and recent[0] < since:
            recent.popleft()
        if len(self._asked) > MAX_USERS:
            self._asked = {other: times for other, times in self._asked.items() if times or other == uid}
        return recent
