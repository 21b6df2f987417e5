"""Which roots' tracking has a gap, because somebody went round the overlay, and when it counts again.

Guarantees: a gap is remembered until a snapshot that was cut after the last bypass had ended, and that compared
everything, is committed; a successor of the daemon knows of it. docs/decisions/trust.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.runtime import RuntimeDirectory
from ciuic.daemon.supervisor import RootSupervisor

log = structlog.get_logger(__name__)


class Trust:
    """Belongs to the trio thread. The mark itself is ``RootSupervisor.untrusted``."""

    def __init__(self, roots: Callable[[], Mapping[str, RootSupervisor]], runtime: RuntimeDirectory) -> None:
        self._roots = roots
        self._runtime = runtime
        self._noted: set[str] | None = None

    def settle(self, committed: PendingSnapshot) -> None:
        """Takes the mark off the roots that this snapshot compared whole, with nobody going round at its cut."""
        roots = self._roots()
        captured = {cut.path for cut in committed.remaining}
        compared = {path for path, trusted in committed.trust_tracking.items() if not trusted} & captured
        for path in committed.settles & compared:
            if path in roots and roots[path].all_accounted:
                roots[path].untrusted = False
        self.note()

    def note(self) -> None:
        """Writes the marks down for a successor, if they have changed."""
        untrusted = {path for path, supervisor in self._roots().items() if supervisor.untrusted}
        if untrusted == self._noted:
            return
        try:
            self._runtime.write_untrusted(untrusted)
            self._noted = untrusted
        except OSError as error:
            log.error("journal_not_written", error=str(error))

    def take_over(self, paths: set[str] | None) -> None:
        """Marks what a predecessor had marked; every root where that is not known (None)."""
        for path, supervisor in self._roots().items():
            supervisor.untrusted |= paths is None or path in paths
        self.note()
