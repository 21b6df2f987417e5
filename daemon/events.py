"""State changes, for whoever listens: the event stream of the control API.

Guarantees: emitting never waits; a listener that does not keep up loses its oldest events, never the daemon's time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

import trio

from ciuic.control_types import Alert, Event, Incident, SnapshotState, rfc3339

BACKLOG = 256


class Subscription:
    """One listener's events since it began to listen, the newest ``BACKLOG`` of them."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque(maxlen=BACKLOG)
        self._wake = trio.Event()
        self._closed = False

    def push(self, event: Event) -> None:
        self._waiting.append(event)
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Ends when the bus is closed."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._closed:
                return
            self._wake = trio.Event()
            await self._wake.wait()


class EventBus:
    """Belongs to the trio thread."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._subscriptions: set[Subscription] = set()
        self._closed = False

    def emit(
        self,
        kind: str,
        *,
        root: str = "",
        snapshot: SnapshotState | None = None,
        alert: Alert | None = None,
        incident: Incident | None = None,
        detail: str = "",
    ) -> None:
        """Tells every listener. ``kind`` is a stable snake_case phrase."""
        event = Event(
            kind=kind,
            time=rfc3339(self._now_ns()),
            root=root,
            snapshot=snapshot,
            alert=alert,
            incident=incident,
            detail=detail,
        )
        for subscription in self._subscriptions:
            subscription.push(event)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Listens from now until the block ends."""
        subscription = Subscription()
        if self._closed:
            subscription.close()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def close(self) -> None:
        """No more events: every listener's iteration ends."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()
