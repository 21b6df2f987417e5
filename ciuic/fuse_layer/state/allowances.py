"""Quotas of users for the limited resources of a worker (descriptors, handles, listed names), and shared descriptors.

A worker opens files for all users of a root, so that the kernel's limits, which are per process and per user,
do not tell them apart. Guarantees: a user who holds much is refused (EMFILE) while there is room for others,
so that no user is refused because of what another one holds; root and the owner of the root have a part of
their own; a user who holds little is never refused for it. Readers of one file share descriptors where it has
many handles.

References:
    Choudhury and Hahne 1998, dynamic thresholds of shared packet buffers: a user may hold at most three times
    what is free. One user alone gets three quarters of it, two get three sevenths each, and something always
    remains for the next.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

from ciuic.fuse_layer.system.path_handles import Descriptor

_SHARE_OF_FREE: Final = 3
_PRIVILEGED_PART: Final = 8
"""Divisor of the total that gives the part of root and the owner of the root."""
UNLIMITED: Final = 1 << 62
MAX_SHARING_HANDLES: Final = 2 << 20
"""Limit of handles that share a descriptor: some 800 bytes of this process each."""
MAX_LISTED_NAMES: Final = 20 << 20
"""Limit of names that open directories have in memory: some 100 bytes each."""
OWN_DESCRIPTORS: Final = 16
"""Handles of one file that have descriptors of their own before readers begin to share. A descriptor carries
the kernel's read-ahead, which several streams would disturb; beyond this number sharing matters more."""
_RESERVED_DESCRIPTORS: Final = 2048
"""Descriptors for this process itself: cached directories, undo log, sockets, requests in work."""


class Quota:
    """Quota of one kind of resource. Thread-safe.

    `check` comes before a unit is taken and `add` after it: threads that check at the same time may exceed a
    bound by as many units as there are threads.
    """

    def __init__(self, total: int = UNLIMITED, *, owner: Callable[[], int] = lambda: 0) -> None:
        """Make a quota of ``total`` units for all users together; ``owner`` is asked for the owner of the root at a refusal."""
        self.total = total
        self._for_all = total - total // _PRIVILEGED_PART
        self._owner = owner
        # For counting alone: it is taken in every open(2) of the job.
        self._lock = threading.Lock()
        self._given_back: deque[tuple[int, int]] = deque()
        self._held: dict[int, int] = {}
        self._sum = 0

    def held(self, uid: int) -> int:
        """Return the units that a user holds."""
        with self._lock:
            self._settle()
            return self._held.get(uid, 0)

    def check(self, uid: int, units: int = 1) -> None:
        """Refuse a user who may not have more units.

        Raises:
            OSError: EMFILE where the user holds too much, ENFILE where nothing is left.
        """
        # Without the lock first: what was given back and is not counted yet can only make the answer too
        # strict.
        ordinary = self._for_all - self._sum
        if units <= ordinary and self._held.get(uid, 0) < _SHARE_OF_FREE * ordinary:
            return
        held = self.held(uid)
        # Once more after what was given back is counted.
        ordinary = self._for_all - self._sum
        if units <= ordinary and held < _SHARE_OF_FREE * ordinary:
            return
        # A directory with more names than the quota is listed all the same, once.
        if units > 1 and not held:
            return
        if units <= self.total - self._sum and uid in (0, self._owner()):
            return
        number = errno.EMFILE if held else errno.ENFILE
        raise OSError(number, os.strerror(number))

    def add(self, uid: int, units: int = 1) -> None:
        """Count units that a user has taken."""
        with self._lock:
            self._held[uid] = self._held.get(uid, 0) + units
            self._sum += units
            if self._given_back:
                self._settle()

    def remove(self, uid: int, units: int = 1) -> None:
        """Count units that a user no longer holds."""
        with self._lock:
            self._take_back(uid, units)

    def give_back(self, uid: int, units: int = 1) -> None:
        """Count units as `remove` does, from a finalizer: a garbage collection may come in the middle of `add`."""
        # No lock: the same thread may hold it. deque.append is atomic; `_settle` counts later.
        self._given_back.append((uid, units))

    def _settle(self) -> None:
        """Count what was given back. The caller holds the lock."""
        while self._given_back:
            self._take_back(*self._given_back.popleft())

    def _take_back(self, uid: int, units: int) -> None:
        self._sum -= units
        left = self._held.get(uid, 0) - units
        if left > 0:
            self._held[uid] = left
        else:
            self._held.pop(uid, None)


class SharedReader(Descriptor):
    """A descriptor for reading that several handles of one file and one user share; it counts in the user's quota once."""

    __slots__ = ("__weakref__", "_quota", "_uid")

    def __init__(self, fd: int, quota: Quota, uid: int) -> None:
        super().__init__(fd)
        self._quota = quota
        self._uid = uid
        quota.add(uid)

    def __del__(self) -> None:
        os.close(self.fd)
        self._quota.give_back(self._uid)


class Allowances:
    """Quotas of one worker. Thread-safe."""

    def __init__(self, owner: Callable[[], int] = lambda: 0) -> None:
        """Make the quotas; ``owner`` returns the user id of the root's owner."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = UNLIMITED if limit == resource.RLIM_INFINITY else limit
        # Half of the limit where that is small: a reserve for this process must leave some for programs.
        self.descriptors = Quota(self.limit - min(_RESERVED_DESCRIPTORS, self.limit // 2), owner=owner)
        self.sharing = Quota(MAX_SHARING_HANDLES, owner=owner)
        self.names = Quota(MAX_LISTED_NAMES, owner=owner)
        self._shared: dict[tuple[int, int], weakref.ref[SharedReader]] = {}

    def shared_reader(self, node_id: int, uid: int, open_: Callable[[], int]) -> SharedReader:
        """Return the descriptor that this user's handles of a node share; ``open_`` opens the inode for reading only.

        It is never one that can write, nor one of another user, whose quota would be charged.
        """
        # A node's id means the same file for as long as a handle is open, also when the file gets another
        # inode (`TruncateSwaps` points the descriptors to that). Weak references: the descriptor closes with
        # the last handle, in whatever thread that is released.
        key = (node_id, uid)
        reference = self._shared.get(key)
        known = reference() if reference is not None else None
        if known is not None:
            return known
        made = SharedReader(open_(), self.descriptors, uid)
        self._shared[key] = weakref.ref(made, lambda gone: self._forget(key, gone))
        return made

    def _forget(self, key: tuple[int, int], gone: weakref.ref[SharedReader]) -> None:
        """Drop the entry of a descriptor that has closed.

        Called by a finalizer, in any thread at any moment: takes no lock.
        """
        if self._shared.get(key) is gone:
            self._shared.pop(key, None)


def owner_of(directory_fd: int) -> Callable[[], int]:
    """Return a function that tells the owner of a directory, read at each call: chown(2) may change it."""
    return lambda: os.fstat(directory_fd).st_uid
