"""Quotas of one worker (descriptors, handles, listed names), and descriptors that readers of one file share."""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Callable
from typing import Final

from ciuic.fuse_layer.system.path_handles import Descriptor
from ciuic.fuse_layer.system.quota import UNLIMITED, Quota

MAX_SHARING_HANDLES: Final = 2 << 20
"""Limit of handles that share a descriptor: some 800 bytes of this process each."""
MAX_LISTED_NAMES: Final = 20 << 20
"""Limit of names that open directories have in memory: some 100 bytes each."""
OWN_DESCRIPTORS: Final = 16
"""Handles of one file that have descriptors of their own before readers begin to share. A descriptor carries
the kernel's read-ahead, which several streams would disturb; beyond this number sharing matters more."""
_RESERVED_DESCRIPTORS: Final = 2048
"""Descriptors for this process itself: cached directories, undo log, sockets, requests in work."""


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
        # inode (truncate_swap.py points the descriptors to that). Weak references: the descriptor closes with
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
