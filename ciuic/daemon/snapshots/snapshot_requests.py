"""Requests for snapshots that wait for their cut, merged where one cut answers several.

A request waits while another cut is made, and while the queue of captures is full. Waiting requests for the
same roots, tags and hold are merged: one cut answers them all, with one id. Each gets what it asked for,
because the cut begins after the request was made.

Before a cut the caches of its roots are flushed, and writers past the overlay get a moment to finish: seconds
that the owner of a root can draw out. So each ordinary user has a turn of their own for that, and only the cut
itself is made under one lock, administrators and the schedule first: 50 threads of one owner left another
one 3 cuts of 15, and root waited for 13 s.

Guarantees: a request is merged only with others whose cut has not begun; a request whose connection has ended
keeps no other from its cut. A request for a pair is never merged: it names the one training state that it
belongs to. Belongs to the trio thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import trio

from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import SnapshotRequest

# Messages of merged requests that the snapshot carries; of the others it carries the number.
MAX_MESSAGES = 3


class _Kind(NamedTuple):
    """Properties that requests must have in common to be merged."""

    roots: frozenset[str]
    tags: frozenset[str]
    hold: bool
    user: int | None


class SharedCut:
    """Cut that is to be made, for one request or several merged ones."""

    def __init__(self, request: SnapshotRequest, *, scheduled: bool, requested: bool) -> None:
        self.roots = list(request.roots)
        self.tags = list(dict.fromkeys(request.tags))
        self.hold = request.hold
        self.scheduled = scheduled
        """True if the schedule is among the requesters."""
        self.requested = requested
        """True if a caller other than the schedule is."""
        self.pending: PendingSnapshot | None = None
        """The snapshot, once it is cut."""
        self.failure: CiuicError | None = None
        """Reason for which it could not be cut."""
        self.waiting = 0
        """Requests that are not answered yet."""
        self._messages: dict[str, None] = {}

    def add(self, request: SnapshotRequest, *, scheduled: bool, requested: bool) -> None:
        """Add the first or another request."""
        if request.message:
            self._messages[request.message] = None
        self.scheduled = self.scheduled or scheduled
        self.requested = self.requested or requested

    @property
    def message(self) -> str:
        """Messages of the merged requests, the first `MAX_MESSAGES` in full."""
        messages = list(self._messages)
        more = len(messages) - MAX_MESSAGES
        return "; ".join(messages[:MAX_MESSAGES] + ([f"and {more} more"] if more > 0 else []))

    @property
    def outcome(self) -> PendingSnapshot | None:
        """The snapshot; None before the cut. Raises the failure of a cut that was tried."""
        if self.failure is not None:
            # A new exception for each request: one object raised in several tasks would collect the
            # tracebacks of all.
            raise type(self.failure)(self.failure.message, hint=self.failure.hint)
        return self.pending


class WaitingRequests:
    """Requests of one daemon whose cut has not begun."""

    def __init__(self) -> None:
        # Cuts that further requests may join.
        self._open: dict[_Kind, SharedCut] = {}
        self._all: list[SharedCut] = []

    @property
    def caller_waits(self) -> bool:
        """True if a caller other than the schedule waits for a cut."""
        return any(cut.requested for cut in self._all)

    @contextmanager
    def join(
        self,
        request: SnapshotRequest,
        *,
        scheduled: bool,
        requested: bool,
        alone: bool,
        user: int | None = None,
    ) -> Iterator[SharedCut]:
        """Merge a request with one that waits, or add it as a new cut, for as long as the block lasts.

        Args:
            request: the request.
            scheduled: the schedule is the requester.
            requested: a caller waits for the snapshot.
            alone: never merge the request.
            user: ordinary user that asks; None for administrators and the schedule.
        """
        kind = _Kind(frozenset(request.roots), frozenset(request.tags), request.hold, user)
        cut = None if alone else self._open.get(kind)
        if cut is None:
            cut = SharedCut(request, scheduled=scheduled, requested=requested)
            self._all.append(cut)
            if not alone:
                self._open[kind] = cut
        cut.add(request, scheduled=scheduled, requested=requested)
        cut.waiting += 1
        try:
            yield cut
        finally:
            cut.waiting -= 1
            if not cut.waiting:
                self.close(cut)
                self._all.remove(cut)

    def close(self, cut: SharedCut) -> None:
        """Let no further request join: the cut begins, or no request is left."""
        self._open = {kind: known for kind, known in self._open.items() if known is not cut}


class CutTurns:
    """Who prepares a cut, and who makes one. A user is a uid, or None for administrators and the schedule."""

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._of_users: defaultdict[int | None, trio.Lock] = defaultdict(trio.Lock)
        # Administrators that wait for the lock; while there are any, no ordinary user keeps it.
        self._first = 0
        self._none_first = trio.Event()

    @asynccontextmanager
    async def of(self, user: int | None) -> AsyncIterator[None]:
        """Let this user's requests prepare their cuts one after the other."""
        lock = self._of_users[user]
        async with lock:
            yield
        if not lock.locked():
            self._of_users.pop(user, None)

    @asynccontextmanager
    async def cut(self, user: int | None) -> AsyncIterator[None]:
        """Let one cut at a time be made; hold it until the queue has the cut, whose order is the queue's."""
        await self._acquire(user)
        try:
            yield
        finally:
            self._lock.release()

    async def _acquire(self, user: int | None) -> None:
        if user is None:
            self._first += 1
            try:
                await self._lock.acquire()
            finally:
                self._first -= 1
                if not self._first:
                    self._none_first.set()
                    self._none_first = trio.Event()
            return
        while True:
            await self._lock.acquire()
            if not self._first:
                return
            self._lock.release()
            await self._none_first.wait()
