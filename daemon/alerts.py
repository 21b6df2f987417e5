"""What an operator should know now: conditions with a beginning, a remedy, and an end.

Guarantees: an alert keeps the time of its first report however often it is reported again, and goes when its cause is
cleared. Leaves to others: showing them (status document, metrics, events) and deciding what is one.
"""

from __future__ import annotations

from collections.abc import Callable

from ciuic.control_types import Alert, Severity, rfc3339
from ciuic.daemon.events import EventBus

KEY_MISSING = "missing"
"""Of the alert that the repository is not where it was."""


class Alerts:
    """The standing alerts, by key. Belongs to the trio thread."""

    def __init__(self, events: EventBus, now_ns: Callable[[], int]) -> None:
        self._events = events
        self._now_ns = now_ns
        self._standing: dict[str, Alert] = {}

    def report(
        self, key: str, message: str, *, hint: str = "", root: str = "", severity: Severity = "problem"
    ) -> None:
        """The condition holds. The same condition reported again keeps its beginning; a new wording is announced."""
        known = self._standing.get(key)
        since = known.since if known else rfc3339(self._now_ns())
        alert = Alert(key=key, severity=severity, since=since, message=message, hint=hint, root=root)
        if alert != known:
            self._standing[key] = alert
            self._events.emit("alert_raised", root=root, alert=alert)

    def clear(self, key: str) -> None:
        """The condition no longer holds; nothing happens if it did not."""
        alert = self._standing.pop(key, None)
        if alert is not None:
            self._events.emit("alert_cleared", root=alert.root, alert=alert)

    def standing(self) -> list[Alert]:
        """Problems first, then by beginning."""
        return sorted(self._standing.values(), key=lambda alert: (alert.severity != "problem", alert.since))

    def __contains__(self, key: str) -> bool:
        return key in self._standing
