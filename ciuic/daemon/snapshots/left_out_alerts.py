"""Alerts about roots that a committed snapshot lacks."""

from __future__ import annotations

from ciuic.daemon.base.alerts import Alerts
from ciuic.daemon.snapshots.pending import PendingSnapshot


class LeftOutAlerts:
    """Alerts about left-out roots.

    An alert stands until a committed snapshot has the root again or was requested without it.
    """

    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts
        self._standing: set[str] = set()

    def tell(self, committed: PendingSnapshot) -> None:
        """Report roots that the snapshot lacks, and clear the others.

        A root that was not mounted has an alert of its own.
        """
        cut = {cut.path for cut in committed.record.cuts}
        left_out = {path: reason for path, reason in committed.record.left_out.items() if path in cut}
        for path in self._standing - left_out.keys():
            self._alerts.clear(f"left-out:{path}")
        self._standing = set(left_out)
        for path, reason in left_out.items():
            self._alerts.report(
                f"left-out:{path}",
                f"{path} is not in snapshot {committed.id}: {reason}",
                hint="its changes will be in the next snapshot that has it; the last one that had it is kept until then",
                root=path,
            )
