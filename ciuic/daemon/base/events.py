"""Event bus: state changes for the control API's event stream, metrics and the alert hook.

Guarantees: emitting never waits; a listener that does not keep up loses its oldest events and delays nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

import trio

from ciuic.protocol.control_types import Alert, Event, Incident, SnapshotState, rfc3339

# Events that wait for one listener. A progress event comes twice a second, so this is about two minutes of a
# capture.
BACKLOG = 256


class Subscription:
    """Events for one listener since it began to listen, the newest `BACKLOG` of them."""

    def __init__(self) -> None:
        # The oldest event is dropped when the listener does not keep up.
        self._waiting: deque[Event] = deque(maxlen=BACKLOG)
        self._wake = trio.Event()
        self._closed = False

    def push(self, event: Event) -> None:
        """Queue an event."""
        self._waiting.append(event)
        self._wake.set()

    def close(self) -> None:
        """End the iteration of the listener."""
        self._closed = True
        self._wake.set()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield events until the bus is closed."""
        while True:
            # All that waits before the end is looked at, and no await between the look and the new event:
            # nothing that is pushed is missed.
            while self._waiting:
                yield self._waiting.popleft()
            if self._closed:
                return
            self._wake = trio.Event()
            await self._wake.wait()


class EventBus:
    """Bus of one daemon. Belongs to the trio thread."""

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
        """Send an event to every listener. `kind` is a stable snake_case phrase."""
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
        """Listen from now until the block ends."""
        subscription = Subscription()
        if self._closed:
            subscription.close()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End the iteration of every listener."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()
