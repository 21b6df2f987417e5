"""Takes last snapshots that are owed, and ends the protection of their roots (ciuic.config.owed_snapshots).

Guarantees: a record goes only when its snapshot is durable, or when its root is gone from the configuration or from the disk,
which is said. Until then it is tried again, and an alert says why it was not taken. Belongs to the trio thread.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog
import trio

from ciuic.config.owed_snapshots import OwedSnapshot, owed_snapshots, settle_snapshot
from ciuic.daemon.base.events import Alerts, Wakeup
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import SnapshotRequest

log = structlog.get_logger(__name__)


class OwedSnapshots:
    """Takes owed snapshots. `run` is its task."""

    def __init__(
        self,
        file: Callable[[], str],
        take: Callable[[SnapshotRequest], Awaitable[PendingSnapshot]],
        roots: Callable[[], Mapping[str, RootSupervisor]],
        unprotect: Callable[[str], Awaitable[None]],
        alerts: Alerts,
    ) -> None:
        """Prepare to take them.

        Args:
            file: returns the configuration file; empty for none.
            take: cuts a snapshot.
            roots: supervisors of the roots, by path.
            unprotect: unmounts a root that is no longer configured.
            alerts: where failures are reported.
        """
        self._file = file
        self._take = take
        self._roots = roots
        self._unprotect = unprotect
        self._alerts = alerts
        self._wakeup = Wakeup()
        self._ending: set[str] = set()
        """Roots whose snapshot is taken, and that are still to be unmounted."""

    def retry(self) -> None:
        """Look for owed snapshots: time has passed, a root was mounted, or the configuration was read anew."""
        self._wakeup.set()

    async def run(self) -> None:
        """Take what is owed, until cancelled."""
        while True:
            if file := self._file():
                for owed in await trio.to_thread.run_sync(owed_snapshots, Path(file)):
                    await self._settle(Path(file), owed)
            for path in list(self._ending):
                # An error here would end the daemon; the root's own alert says why it is still mounted.
                with suppress(CiuicError, OSError):
                    await self._end(path)
            await self._wakeup.wait()

    async def _end(self, path: str) -> None:
        """Unmount a root that is no longer configured; where that fails it is tried again."""
        if path in self._ending:
            await self._unprotect(path)
            self._ending.discard(path)
            self._alerts.clear(f"owed:{path}")

    async def _settle(self, file: Path, owed: OwedSnapshot) -> None:
        key = f"owed:{owed.root}"
        root = self._roots().get(owed.root)
        try:
            lost = ""
            if root is not None and root.worker is not None:
                request = SnapshotRequest(roots=[owed.root], message=owed.message, tags=list(owed.tags))
                pending = await self._take(request)
                await pending.finished.wait()
                if pending.failure is not None:
                    raise pending.failure
            elif root is not None and await trio.to_thread.run_sync(
                _is_gone, owed.root, abandon_on_cancel=True
            ):
                lost = root.error
            elif root is not None:
                return  # it is being mounted, or its own alert says why not
            if await trio.to_thread.run_sync(settle_snapshot, file, owed):
                self._ending.add(owed.root)
            await self._end(owed.root)
        except (CiuicError, OSError) as error:
            log.error("owed_snapshot_failed", root=owed.root, error=str(error))
            known = error.hint if isinstance(error, CiuicError) else ""
            self._alerts.report(
                key,
                f"the last snapshot of {owed.root} and the end of its protection are owed: {error}",
                hint=known
                or f"it is tried again; to do without it: ciuic unprotect {shlex.quote(owed.root)}",
            )
        except Exception as error:  # a defect in one snapshot must not end the task
            log.exception("owed_snapshot_failed", root=owed.root)
            self._alerts.report(
                key, f"the last snapshot of {owed.root} was not taken, by a defect: {error!r}"
            )
        else:
            self._alerts.clear(key)
            if lost:
                log.error("owed_snapshot_lost", root=owed.root, error=lost)
                self._alerts.report(
                    key,
                    f"the last snapshot of {owed.root} could not be taken: {lost}",
                    hint="it was moved or removed; it is no longer protected",
                )


def _is_gone(root: str) -> bool:
    """Return whether the protected directory was moved or removed; False if that cannot be determined."""
    try:
        return not stat.S_ISDIR(os.lstat(root).st_mode) or os.path.realpath(root) != root
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
