"""Who may hold how much of what a worker has only so much of: descriptors, handles, names of listings.

A worker opens files for all users of a root, so that the kernel's limits, which are per process and per user, do not tell them
apart. Guarantees: a user who holds much is refused (EMFILE) while there is room for others, so nobody is refused because of what
another user holds; root and the owner of the root have a part to themselves. Users who hold nothing much are never refused for it.

The rule is that of shared packet buffers (Choudhury and Hahne 1998, dynamic thresholds): a user may hold at most three times what
is free. One user alone gets three quarters of it, two get three sevenths each, and something always remains for the next.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_SHARE_OF_FREE: Final = 3
_PRIVILEGED_PART: Final = 8
"""One part in so many is for root and the owner of the root alone."""
UNLIMITED: Final = 1 << 62


class Quota:
    """Of one kind of thing. Thread-safe. `check` comes before something is made and `add` after it: threads that check at the same
    time may exceed a bound by as many as they are."""

    def __init__(self, total: int = UNLIMITED, *, owner: Callable[[], int] = lambda: 0) -> None:
        """``total``: units for everybody together. ``owner``: the user id of the root's owner, asked when somebody is refused."""
        self.total = total
        self._for_all = total - total // _PRIVILEGED_PART
        self._owner = owner
        self._lock = threading.Lock()
        """For counting alone: it is taken in every open(2) of the job."""
        self._given_back: deque[tuple[int, int]] = deque()
        self._held: dict[int, int] = {}
        self._sum = 0

    def held(self, uid: int) -> int:
        """Units that a user holds."""
        with self._lock:
            self._settle()
            return self._held.get(uid, 0)

    def check(self, uid: int, units: int = 1) -> None:
        """OSError for a user who may not have more: EMFILE who holds too much, ENFILE where nothing is left."""
        ordinary = self._for_all - self._sum
        if units <= ordinary and self._held.get(uid, 0) < _SHARE_OF_FREE * ordinary:
            return
        held = self.held(uid)
        ordinary = self._for_all - self._sum
        if units <= ordinary and held < _SHARE_OF_FREE * ordinary:
            return
        if units > 1 and not held:
            return  # a directory with more names than that is listed all the same, once
        if units <= self.total - self._sum and uid in (0, self._owner()):
            return
        number = errno.EMFILE if held else errno.ENFILE
        raise OSError(number, os.strerror(number))

    def add(self, uid: int, units: int = 1) -> None:
        """The user holds more."""
        with self._lock:
            self._held[uid] = self._held.get(uid, 0) + units
            self._sum += units
            if self._given_back:
                self._settle()

    def remove(self, uid: int, units: int = 1) -> None:
        """The user holds less."""
        with self._lock:
            self._take_back(uid, units)

    def give_back(self, uid: int, units: int = 1) -> None:
        """As `remove`, at any moment, also by a garbage collection that comes in the middle of `add`: takes no lock."""
        self._given_back.append((uid, units))

    def _settle(self) -> None:
        """Count what was given back. The caller has the lock."""
        while self._given_back:
            self._take_back(*self._given_back.popleft())

    def _take_back(self, uid: int, units: int) -> None:
        self._sum -= units
        left = self._held.get(uid, 0) - units
        if left > 0:
            self._held[uid] = left
        else:
            self._held.pop(uid, None)
