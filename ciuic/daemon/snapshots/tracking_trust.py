"""Roots whose tracking has a gap, because a process wrote past the overlay, and when tracking counts again.

Guarantees: a gap is remembered until a snapshot that was cut after the last bypass had ended, and that
compared everything, is committed; a successor of the daemon knows of it. docs/decisions/trust.md has the
reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.pending import PendingSnapshot

log = structlog.get_logger(__name__)


class TrackingTrust:
    """Marks of roots with a gap (`RootSupervisor.untrusted`). Belongs to the trio thread."""

    def __init__(self, roots: Callable[[], Mapping[str, RootSupervisor]], runtime: RuntimeDirectory) -> None:
        self._roots = roots
        self._runtime = runtime
        self._noted: set[str] | None = None

    def settle(self, committed: PendingSnapshot) -> None:
        """Remove the mark of roots that this snapshot compared completely, with no bypass at its cut."""
        roots = self._roots()
        captured = {cut.path for cut in committed.remaining}
        compared = {path for path, trusted in committed.trust_tracking.items() if not trusted} & captured
        # Not at the end of the bypassing process, and not at the next cut: if that capture failed, the
        # following one would trust tracking that never saw the last writes of the process
        # (docs/decisions/trust.md).
        for path in committed.unbypassed & compared:
            if path in roots and roots[path].all_accounted:
                roots[path].untrusted = False
        self.note()

    def note(self) -> None:
        """Write the marks to the runtime directory for a successor, if they have changed."""
        untrusted = {path for path, supervisor in self._roots().items() if supervisor.untrusted}
        if untrusted == self._noted:
            return
        try:
            self._runtime.write_untrusted(untrusted)
            self._noted = untrusted
        except OSError as error:
            log.error("journal_not_written", error=str(error))

    def take_over(self, paths: set[str] | None) -> None:
        """Restore the marks of a predecessor.

        Args:
            paths: roots that it had marked; None where that is not known, and then every root is marked.
        """
        for path, supervisor in self._roots().items():
            supervisor.untrusted |= paths is None or path in paths
        self.note()
