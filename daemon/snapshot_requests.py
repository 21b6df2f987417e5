"""Requests for snapshots that wait for their cut, and which of them one cut answers.

A request waits while another cut is made, and while the queue of captures is full. Those that wait and ask for the same (roots, tags,
hold) are merged: one cut answers them all, with one id. Each gets what it asked for, because the cut begins after it was made.

Guarantees: a request is merged only with others whose cut has not begun; one whose requester has gone (its connection ended) keeps no
other from its cut. A request for a pair is never merged: it names the one state that it belongs to. Belongs to the trio thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ciuic.control_types import SnapshotRequest
from ciuic.daemon.pending import PendingSnapshot
from ciuic.errors import CiuicError

MAX_MESSAGES = 3
"""Messages of merged requests that the snapshot carries; the number of the others is told."""


class _Kind(NamedTuple):
    """What requests must have in common to be merged."""

    roots: frozenset[str]
    tags: frozenset[str]
    hold: bool


class SharedCut:
    """One cut that is to be made, and what is asked of it."""

    def __init__(self, request: SnapshotRequest, *, scheduled: bool, requested: bool) -> None:
        self.roots = list(request.roots)
        self.tags = list(dict.fromkeys(request.tags))
        self.hold = request.hold
        self.scheduled = scheduled
        """The schedule asked for it, perhaps besides others."""
        self.requested = requested
        """Somebody asked for it, perhaps besides the schedule."""
        self.pending: PendingSnapshot | None = None
        """The snapshot, when it is cut."""
        self.failure: CiuicError | None = None
        """Why it could not be cut."""
        self.waiting = 0
        """Requests that it has still to answer."""
        self._messages: dict[str, None] = {}

    def add(self, request: SnapshotRequest, *, scheduled: bool, requested: bool) -> None:
        """Merge another request, or the first."""
        if request.message:
            self._messages[request.message] = None
        self.scheduled = self.scheduled or scheduled
        self.requested = self.requested or requested

    @property
    def message(self) -> str:
        """Return the messages of the merged requests, the first ones in full."""
        messages = list(self._messages)
        more = len(messages) - MAX_MESSAGES
        return "; ".join(messages[:MAX_MESSAGES] + ([f"and {more} more"] if more > 0 else []))

    @property
    def outcome(self) -> PendingSnapshot | None:
        """Return the snapshot, None before the cut; raise the failure of the cut that was tried."""
        if self.failure is not None:
            raise type(self.failure)(self.failure.message, hint=self.failure.hint)
        return self.pending


class WaitingRequests:
    """Those of one daemon whose cut has not begun."""

    def __init__(self) -> None:
        self._open: dict[_Kind, SharedCut] = {}
        """Cuts that further requests may still join."""
        self._all: list[SharedCut] = []

    @property
    def somebody_waits(self) -> bool:
        """Whether somebody waits for a cut, and not the schedule alone."""
        return any(cut.requested for cut in self._all)

    @contextmanager
    def join(
        self, request: SnapshotRequest, *, scheduled: bool, requested: bool, alone: bool
    ) -> Iterator[SharedCut]:
        """Merge the request with one that waits, or let it wait by itself, for as long as the block lasts.

        Args:
            request: what is asked for.
            scheduled: the schedule asks.
            requested: somebody asks and waits.
            alone: never merge it.
        """
        kind = _Kind(frozenset(request.roots), frozenset(request.tags), request.hold)
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
        """The cut begins, or nobody waits for it: no further request joins it."""
        self._open = {kind: known for kind, known in self._open.items() if known is not cut}
