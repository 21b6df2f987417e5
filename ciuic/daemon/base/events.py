"""Events and alerts of the daemon, the signal that wakes one of its tasks, and the rounds of those that look again and again.

State changes go to the control API's event stream, the metrics and the alert hook. Alerts are for the
operator: conditions with a beginning, a remedy, and an end.

Guarantees: emitting never waits; a listener that does not keep up loses its oldest events and delays nothing.
An alert keeps the time of its first report however often it is reported again, and is removed when its cause
is cleared. Leaves to others: showing alerts (status document, metrics, events) and deciding when to report
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import structlog
import trio

from ciuic.protocol.control_types import Alert, Event, Incident, Severity, SnapshotState, rfc3339

# Events that wait for one listener. A progress event comes twice a second, so this is about two minutes of a
# capture.
BACKLOG = 256
log = structlog.get_logger(__name__)


class Subscription:
    """Events for one listener since it began to listen, the newest `BACKLOG` of them."""

    def __init__(self) -> None:
        # The oldest event is dropped when the listener does not keep up.
        self._waiting: deque[Event] = deque(maxlen=BACKLOG)
        self._wake = trio.Event()
        self._closed = False

    def push(self, event: Event) -> None:
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


# Key of the alert that the repository is not where it was.
KEY_MISSING = "missing"


class Alerts:
    """The standing alerts, by key. Belongs to the trio thread."""

    def __init__(self, events: EventBus, now_ns: Callable[[], int]) -> None:
        self._events = events
        self._now_ns = now_ns
        self._standing: dict[str, Alert] = {}

    def report(
        self,
        key: str,
        message: str,
        *,
        hint: str = "",
        root: str = "",
        severity: Severity = "problem",
        since_ns: int | None = None,
    ) -> None:
        """Report that a condition holds.

        A condition that is reported again keeps its beginning, unless ``since_ns`` gives one; a new wording is announced.
        """
        known = self._standing.get(key)
        if since_ns is not None:
            since = rfc3339(since_ns)
        else:
            since = known.since if known else rfc3339(self._now_ns())
        alert = Alert(key=key, severity=severity, since=since, message=message, hint=hint, root=root)
        # Most conditions are reported every half minute for as long as they hold.
        if alert != known:
            self._standing[key] = alert
            self._events.emit("alert_raised", root=root, alert=alert)

    def clear(self, key: str) -> None:
        """Report that a condition no longer holds; do nothing if it did not."""
        alert = self._standing.pop(key, None)
        if alert is not None:
            self._events.emit("alert_cleared", root=alert.root, alert=alert)

    def standing(self) -> list[Alert]:
        """Return the standing alerts, problems first, then by beginning."""
        return sorted(self._standing.values(), key=lambda alert: (alert.severity != "problem", alert.since))

    def __contains__(self, key: str) -> bool:
        return key in self._standing


class Wakeup:
    """Signal to one task. Setting it while the task works wakes the task once more; belongs to the trio thread."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the task, now or when it waits next."""
        self._event.set()

    async def wait(self) -> None:
        """Wait until the signal is set, and reset it."""
        await self._event.wait()
        # Reset before the task looks at what it has to do, so that what comes during the look wakes it again.
        self._event = trio.Event()


async def repeat(
    once: Callable[[], Awaitable[object]], pause_seconds: float, defect: str, first_seconds: float = 0.0
) -> NoReturn:
    """Call `once` again and again, until cancelled. A defect in it must not end the service, nor the rounds to come.

    Args:
        once: does one round.
        pause_seconds: pause between two rounds.
        defect: name of the log's event about a round that raised.
        first_seconds: pause before the first round.
    """
    await trio.sleep(first_seconds)
    while True:
        try:
            await once()
        except Exception:
            log.exception(defect)
        await trio.sleep(pause_seconds)
