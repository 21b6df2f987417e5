"""Processes that reach one root without passing its overlay, and whether tracking has a gap because of them.

They are looked for after the mount: what was opened before it has another mount id, so nothing is lost by that, and a /proc that
somebody has made slow delays no mount. Until a look has come to its end, tracking counts as having a gap.

Guarantees: an alert stands for as long as such a process is known to live. When a gap is over is trust.py's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import structlog
import trio

from ciuic.bypass import Bypasser
from ciuic.control_types import BypassReport
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.mount_hooks import MountHooks

LOOK_SECONDS = 60.0
"""For one look. A host with ten thousand processes takes ten; reading the memory map of a process that its owner keeps locked
takes for ever."""
PATIENCE_SECONDS = 2.0
"""For which a snapshot waits for a look: without its result everything has to be compared."""
log = structlog.get_logger(__name__)


class BypassWatch:
    """Of one root. Belongs to the trio thread."""

    def __init__(self, path: str, hooks: MountHooks, alerts: Alerts) -> None:
        self._path = path
        self._hooks = hooks
        self._alerts = alerts
        self.processes: list[Bypasser] = []
        self.has_gap = False
        self._looked = trio.Event()
        self._looked.set()

    @property
    def all_accounted(self) -> bool:
        """Whether nobody goes round the overlay, which is known."""
        return self._looked.is_set() and not self.processes

    def mounted(self, *, adopted: bool) -> None:
        """A mount is there. One that is not ``adopted`` was made just now, and whoever holds something from before is not known
        yet: for all that is known, it writes."""
        self._looked = trio.Event()
        self.has_gap |= not adopted

    async def run(self, own_pids: Callable[[], Collection[int]]) -> None:
        """Looks until the first look has come to its end."""
        while not self._looked.is_set():
            await self.look(own_pids())
            if not self._looked.is_set():
                await trio.sleep(LOOK_SECONDS)

    async def look(self, ignore_pids: Collection[int]) -> None:
        """Whoever goes round now."""
        found = await self._bypassing(ignore_pids, LOOK_SECONDS)
        if found is None:
            self._alerts.report(
                f"bypass:{self._path}",
                f"it is not known whether processes reach {self._path} without passing the overlay: looking through /proc did "
                f"not end within {LOOK_SECONDS:.0f} seconds",
                hint="captures compare the whole tree until it does; a process may hinder it on purpose",
                root=self._path,
                severity="warning",
            )
            return
        self._looked.set()
        self._take(found)

    async def refresh(self, ignore_pids: Collection[int]) -> None:
        """Looks whether those that are known are gone; waits a moment for a first look that is under way."""
        with trio.move_on_after(PATIENCE_SECONDS):
            await self._looked.wait()
        if not self.processes or not self._looked.is_set():
            return
        known = {process.pid for process in self.processes}
        found = await self._bypassing(ignore_pids, PATIENCE_SECONDS, known)
        if found is not None:
            self._take([process for process in found if process.pid in known])

    async def _bypassing(
        self, ignore_pids: Collection[int], seconds: float, only_pids: Collection[int] | None = None
    ) -> list[Bypasser] | None:
        """None when that could not be found out in time."""
        with trio.move_on_after(seconds):
            try:
                return await self._hooks.bypassing(self._path, ignore_pids, only_pids)
            except (OSError, ValueError) as error:
                log.warning("bypass_not_looked_for", root=self._path, error=str(error))
                return []
        log.warning("bypass_look_not_ended", root=self._path, seconds=seconds)
        return None

    def _take(self, found: Sequence[Bypasser]) -> None:
        self.processes = [process for process in found if process.writes]
        self.has_gap |= bool(self.processes)
        self._report(
            f"bypass:{self._path}",
            [process for process in self.processes if process.known],
            f"processes reach {self._path} without passing the overlay",
            "restart them; until then captures compare the whole tree and may miss writes made during a capture",
        )
        self._report(
            f"bypass-unknown:{self._path}",
            [process for process in self.processes if not process.known],
            f"not known is whether these processes reach {self._path} without passing the overlay, because what they have open "
            "lies deeper than any path",
            "end them; until then captures compare the whole tree",
        )

    def _report(self, key: str, processes: Sequence[Bypasser], what: str, hint: str) -> None:
        if not processes:
            self._alerts.clear(key)
            return
        names = ", ".join(f"{process.pid} ({process.command[:60]})" for process in processes[:5])
        more = f" and {len(processes) - 5} more" if len(processes) > 5 else ""
        self._alerts.report(key, f"{what}: {names}{more}", hint=hint, root=self._path, severity="warning")

    def reports(self) -> list[BypassReport]:
        """For a status document."""
        return [_report(process) for process in self.processes]


def _report(process: Bypasser) -> BypassReport:
    paths = dict.fromkeys(use.path.decode("utf-8", "backslashreplace") for use in process.uses if use.writes)
    return BypassReport(pid=process.pid, command=process.command, paths=list(paths)[:20])
