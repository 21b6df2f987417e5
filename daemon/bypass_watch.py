"""Processes that reach one root without passing its overlay, and whether tracking has a gap because of them.

Guarantees: an alert stands for as long as such a process is known to live. When a gap is over is trust.py's to say.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog

from ciuic.bypass import Bypasser
from ciuic.control_types import BypassReport
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.mount_hooks import MountHooks

log = structlog.get_logger(__name__)


class BypassWatch:
    """Of one root."""

    def __init__(self, path: str, hooks: MountHooks, alerts: Alerts) -> None:
        self._path = path
        self._hooks = hooks
        self._alerts = alerts
        self.processes: list[Bypasser] = []
        self.has_gap = False

    async def look(self, ignore_pids: Collection[int]) -> None:
        """Whoever goes round now. To be asked before the mount: afterwards the same processes look like ordinary ones."""
        try:
            found = await self._hooks.bypassing(self._path, ignore_pids)
        except (OSError, ValueError) as error:
            log.warning("bypass_not_looked_for", root=self._path, error=str(error))
            return
        self.processes = [process for process in found if process.writes]
        self.has_gap |= bool(self.processes)
        key = f"bypass:{self._path}"
        if not self.processes:
            self._alerts.clear(key)
            return
        names = ", ".join(f"{process.pid} ({process.command[:60]})" for process in self.processes[:5])
        more = f" and {len(self.processes) - 5} more" if len(self.processes) > 5 else ""
        self._alerts.report(
            key,
            f"processes reach {self._path} without passing the overlay: {names}{more}",
            hint="restart them; until then captures compare the whole tree and may miss writes made during a capture",
            root=self._path,
            severity="warning",
        )

    async def refresh(self, ignore_pids: Collection[int]) -> None:
        """Looks whether those that are known are gone."""
        if not self.processes:
            return
        known = {process.pid for process in self.processes}
        await self.look(ignore_pids)
        self.processes = [process for process in self.processes if process.pid in known]

    def reports(self) -> list[BypassReport]:
        """For a status document."""
        return [_report(process) for process in self.processes]


def _report(process: Bypasser) -> BypassReport:
    paths = dict.fromkeys(use.path.decode("utf-8", "backslashreplace") for use in process.uses if use.writes)
    return BypassReport(pid=process.pid, command=process.command, paths=list(paths)[:20])
