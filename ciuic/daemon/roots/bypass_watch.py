"""Processes and mounts by which one root is reached without passing its overlay (a bypass).

The search runs after the mount: files that were opened before it have another mount id, so nothing is missed
by that, and a slow /proc delays no mount. Until a search has completed, tracking counts as having a gap.

Guarantees: an alert stands for as long as such a process or mount is known to exist. Leaves to snapshots/cut.py
when a gap is over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

import structlog
import trio

from ciuic.daemon.base.events import Alerts
from ciuic.daemon.roots.mount_hooks import MountHooks
from ciuic.protocol.control_types import BypassingMountReport, BypassReport
from ciuic.system.bypass import REMEDY, Bypasser, BypassingMount

# Time limit of one search. A host with ten thousand processes takes ten seconds; reading the memory map of a
# process that its owner keeps locked takes for ever.
LOOK_SECONDS = 60.0
# Longest wait of a snapshot for a search: without its result everything has to be compared.
PATIENCE_SECONDS = 2.0
# Module name in the command line of every overlay worker.
_WORKER = "ciuic.fuse_layer.worker"
log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class BypassWatch:
    """Search for bypasses of one root. Belongs to the trio thread."""

    def __init__(self, path: str, hooks: MountHooks, alerts: Alerts) -> None:
        self._path = path
        self._hooks = hooks
        self._alerts = alerts
        self.processes: list[Bypasser] = []
        self.mounts: list[BypassingMount] = []
        self.has_gap = False
        # Why the last search that failed did.
        self._failure = ""
        self._looked = trio.Event()
        self._looked.set()
        self._search_wanted = trio.Event()

    @property
    def all_accounted(self) -> bool:
        """True if it is known that no process and no mount bypasses the overlay."""
        return self._looked.is_set() and not self.processes and not self.mounts

    # The search runs after the mount, not before it: daemons spun for minutes in a search before the mount,
    # because processes held directories deeper than PATH_MAX. Nothing is missed by that: a descriptor from
    # before the mount refers to the mount below as long as it is open. The gap costs nothing as a rule,
    # because the first snapshot after a mount compares everything anyway.
    def mounted(self, *, adopted: bool) -> None:
        """Begin anew for a mount.

        Args:
            adopted: the mount is a previous daemon's. Of a new mount it is not known which processes hold
                files from before it, so tracking has a gap until the search ends.
        """
        self.has_gap |= not adopted
        self._begin_search()

    def _begin_search(self) -> None:
        self._looked = trio.Event()
        self._search_wanted.set()

    async def serve(self, own_pids: Callable[[], Collection[int]]) -> None:
        """Search whenever that is wanted, until cancelled.

        Args:
            own_pids: returns processes of ciuic, which are not bypasses.
        """
        while True:
            await self._search_wanted.wait()
            await self.run(own_pids)
            self._search_wanted = trio.Event()

    async def run(self, own_pids: Callable[[], Collection[int]]) -> None:
        """Search until a search has completed. Args as for `serve`."""
        while not self._looked.is_set():
            await self.look(own_pids())
            if not self._looked.is_set():
                # Not at once: a search that failed (EMFILE) would be repeated without end.
                await trio.sleep(LOOK_SECONDS)

    async def look(self, ignore_pids: Collection[int]) -> None:
        """Search through all processes and mount namespaces and update the alerts."""
        # Mounts first: a process may have opened files by a mount that is gone when the processes are looked at.
        mounts = await self._mounts_now(ignore_pids, LOOK_SECONDS)
        found = await self._bypassing(ignore_pids, LOOK_SECONDS) if mounts is not None else None
        if found is None or mounts is None:
            # Also for an adopted mount: the previous daemon may not have been able to write its gap down.
            self.has_gap = True
            self._alerts.report(
                f"bypass:{self._path}",
                f"it is not known whether processes reach {self._path} without passing the overlay: {self._failure}",
                hint="captures compare the whole tree until it is known; a process may hinder the search on purpose",
                root=self._path,
                severity="warning",
            )
            return
        self._looked.set()
        self._take_mounts(mounts)
        self._take(found)

    async def refresh(self, ignore_pids: Collection[int]) -> None:
        """Search again among the known processes and all mounts; wait a moment for a search that is running.

        No process can begin to bypass the overlay as long as no mount does. A mount can begin to: where somebody takes the overlay
        off in a mount namespace of their own.
        """
        await self._wait_looked()
        if not self._looked.is_set():
            return
        had_mounts = bool(self.mounts)
        mounts = await self._mounts_now(ignore_pids, PATIENCE_SECONDS)
        if mounts is None or (had_mounts and not mounts):
            # Processes may have files open by mounts that are gone, and such processes are not known yet.
            self.has_gap = True
            self._begin_search()
            await self._wait_looked()
            return
        self._take_mounts(mounts)
        if not self.processes:
            return
        known = {process.pid for process in self.processes}
        found = await self._bypassing(ignore_pids, PATIENCE_SECONDS, known)
        if found is not None:
            self._take([process for process in found if process.pid in known])

    async def _wait_looked(self) -> None:
        with trio.move_on_after(PATIENCE_SECONDS):
            await self._looked.wait()

    async def _mounts_now(self, ignore_pids: Collection[int], seconds: float) -> list[BypassingMount] | None:
        return await self._within(seconds, lambda: self._hooks.bypassing_mounts(self._path, ignore_pids))

    async def _bypassing(
        self, ignore_pids: Collection[int], seconds: float, only_pids: Collection[int] | None = None
    ) -> list[Bypasser] | None:
        return await self._within(seconds, lambda: self._hooks.bypassing(self._path, ignore_pids, only_pids))

    async def _within(self, seconds: float, search: Callable[[], Awaitable[list[_T]]]) -> list[_T] | None:
        """Return what a search finds; None where it does not end or fails, and `_failure` says why."""
        with trio.move_on_after(seconds):
            try:
                return await search()
            except (OSError, ValueError) as error:
                # Not an empty list: with it what is known would count as ended.
                log.warning("bypass_not_looked_for", root=self._path, error=str(error))
                self._failure = f"looking through /proc failed: {error}"
                return None
        self._failure = f"looking through /proc did not end within {seconds:.0f} seconds"
        log.warning("bypass_look_not_ended", root=self._path, seconds=seconds)
        return None

    def _take_mounts(self, mounts: list[BypassingMount]) -> None:
        named = [str(mount) for mount in mounts[:5]]
        if named and named != [str(mount) for mount in self.mounts[:5]]:
            log.warning("tracking_has_gap", root=self._path, mounts=named)
        self.mounts = mounts
        # Never cleared here; see _take.
        self.has_gap |= bool(mounts)
        self._report(
            f"bypass-mounts:{self._path}",
            [str(mount) for mount in mounts],
            f"{self._path} can be written without passing the overlay",
            REMEDY,
        )

    def _take(self, found: Sequence[Bypasser]) -> None:
        known = {process.pid for process in self.processes}
        self.processes = [process for process in found if process.writes]
        if any(process.pid not in known for process in self.processes):
            named = [_named(process) for process in self.processes[:5]]
            located = all(process.known for process in self.processes)
            log.warning("tracking_has_gap", root=self._path, processes=named, located=located)
        # Never cleared here: the gap outlasts the processes, until `TrackingTrust` ends it.
        self.has_gap |= bool(self.processes)
        self._report(
            f"bypass:{self._path}",
            [_named(process) for process in self.processes if process.known],
            f"processes reach {self._path} without passing the overlay",
            _hint_against(self.processes),
        )
        self._report(
            f"bypass-unknown:{self._path}",
            [_named(process) for process in self.processes if not process.known],
            f"it is not known whether these processes reach {self._path} without passing the overlay, because what they have open "
            "lies deeper than any path",
            "end them; until then captures compare the whole tree",
        )

    def _report(self, key: str, named: Sequence[str], what: str, hint: str) -> None:
        if not named:
            self._alerts.clear(key)
            return
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        self._alerts.report(
            key, f"{what}: {', '.join(named[:5])}{more}", hint=hint, root=self._path, severity="warning"
        )

    def reports(self) -> list[BypassReport]:
        """Return the processes as the status document shows them."""
        return [_report(process) for process in self.processes]

    def mount_reports(self) -> list[BypassingMountReport]:
        """Return the mounts as the status document shows them."""
        return [
            BypassingMountReport(
                place=mount.place.decode("utf-8", "backslashreplace"),
                shows=mount.shows.decode("utf-8", "backslashreplace"),
                pid=mount.pid,
                command=mount.command,
                elsewhere=mount.elsewhere,
            )
            for mount in self.mounts
        ]


def _named(process: Bypasser) -> str:
    return f"{process.pid} ({process.command[:60]})"


def _hint_against(processes: Sequence[Bypasser]) -> str:
    """Return what ends the bypass."""
    # An overlay worker that lost its mount serves files of the job, which its end would take away.
    if any(_WORKER in process.command for process in processes):
        act = (
            "leave the overlay worker alone: it serves files that were opened before; restart the programs that have them open, "
            "or the container that took a copy of the mount with it"
        )
    else:
        act = "restart them"
    return f"{act}; until then captures compare the whole tree and may miss writes made during a capture"


def _report(process: Bypasser) -> BypassReport:
    paths = dict.fromkeys(use.path.decode("utf-8", "backslashreplace") for use in process.uses if use.writes)
    return BypassReport(pid=process.pid, command=process.command, paths=list(paths)[:20])
