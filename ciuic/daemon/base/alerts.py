"""Alerts for the operator: conditions with a beginning, a remedy, and an end.

Guarantees: an alert keeps the time of its first report however often it is reported again, and is removed
when its cause is cleared. Leaves to others: showing alerts (status document, metrics, events) and deciding
when to report one.
"""

from __future__ import annotations

from collections.abc import Callable

from ciuic.daemon.base.events import EventBus
from ciuic.protocol.control_types import Alert, Severity, rfc3339

# Key of the alert that the repository is not where it was.
KEY_MISSING = "missing"


class Alerts:
    """The standing alerts, by key. Belongs to the trio thread."""

    def __init__(self, events: EventBus, now_ns: Callable[[], int]) -> None:
        self._events = events
        self._now_ns = now_ns
        self._standing: dict[str, Alert] = {}

    def report(
        self, key: str, message: str, *, hint: str = "", root: str = "", severity: Severity = "problem"
    ) -> None:
        """Report that a condition holds.

        A condition that is reported again keeps its beginning; a new wording is announced.
        """
        known = self._standing.get(key)
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
