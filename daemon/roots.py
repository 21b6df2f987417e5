"""The roots that are served, by path: starting, adding, changing, removing and stopping their supervisors.

Guarantees: one supervisor a root; a removed or stopped root is unmounted when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from ciuic.child_process import environment
from ciuic.control_types import RootStatus
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.events import EventBus
from ciuic.daemon.mount_hooks import MountHooks, RealMounts
from ciuic.daemon.recovery import is_mounted
from ciuic.daemon.runtime import RuntimeDirectory
from ciuic.daemon.sessions import SessionStore
from ciuic.daemon.settings import RootSettings, Settings
from ciuic.daemon.snapshots import Snapshots
from ciuic.daemon.store import Store
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.daemon.worker_process import Worker, WorkerOptions
from ciuic.errors import CiuicError
from ciuic.fuse_layer.control_client import peer_pid
from ciuic.fuse_layer.mounts import remove_state
from ciuic.fuse_layer.standby import SpareProcess
from ciuic.privileges import may_trace

log = structlog.get_logger(__name__)


class Roots:
    """Belongs to the trio thread."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        runtime: RuntimeDirectory,
        store: Callable[[], Store],
        alerts: Alerts,
        events: EventBus,
        snapshots: Snapshots,
        hooks: MountHooks | None = None,
        sessions: SessionStore | None = None,
        spare: SpareProcess | None = None,
    ) -> None:
        self.supervisors: dict[str, RootSupervisor] = {}
        self.nursery: trio.Nursery | None = None
        self.on_mounted: Callable[[], None] = lambda: None
        """Some root is served by a new worker."""
        self.reconcile_new_sessions = False
        """Off during the start, when ``resume`` must come first."""
        self._settings = settings
        self._runtime = runtime
        self._store = store
        self._alerts = alerts
        self._events = events
        self._snapshots = snapshots
        self._sessions = sessions
        self._spare = spare or SpareProcess(runtime.path, environment())
        self._hooks = hooks or RealMounts(self._options, self._own_pids, spare=self._spare, kept=sessions)

    def start(self, root: RootSettings, nursery: trio.Nursery) -> RootSupervisor:
        """Begins to serve ``root``; ``settled`` says when the first attempt is over."""
        supervisor = RootSupervisor(
            root,
            self._hooks,
            alerts=self._alerts,
            events=self._events,
            on_session=self._session_started,
            on_session_lost=self._snapshots.session_lost,
        )
        self.supervisors[root.path] = supervisor
        nursery.start_soon(supervisor.run)
        return supervisor

    async def settled(self) -> None:
        """Every root's first attempt to mount has ended, well or not."""
        for supervisor in list(self.supervisors.values()):
            await supervisor.settled()

    async def add(self, root: RootSettings) -> RootStatus:
        """Mounts ``root`` unless it is; CiuicError, and the daemon keeps trying, when that fails."""
        supervisor = self.change_or_start(root)
        await supervisor.settled()
        await supervisor.not_in_transition()
        if supervisor.state != "mounted":
            raise CiuicError(
                f"{root.path} is not protected yet: {supervisor.error}", hint="the daemon keeps trying"
            )
        return await supervisor.status()

    def change_or_start(self, root: RootSettings) -> RootSupervisor:
        """The supervisor of ``root``, started if need be. New excludes hold from the next capture on."""
        known = self.supervisors.get(root.path)
        if known is not None:
            known.settings = root
            return known
        if self.nursery is None:
            raise CiuicError("the daemon is starting", hint="try again in a moment")
        return self.start(root, self.nursery)

    async def remove(self, path: str) -> None:
        """Unmounts ``path``, and leaves nothing of ours in it; nothing happens if it is no root."""
        supervisor = self.supervisors.get(path)
        if supervisor is None:
            return
        await supervisor.stop()
        if supervisor.state != "unmounted":
            raise CiuicError(f"{path} could not be unmounted", hint="ciuic status says why")
        self.supervisors.pop(path, None)
        if not supervisor.lingers:
            await trio.to_thread.run_sync(remove_state, path)
        kinds = (
            "root",
            "worker",
            "unmounted",
            "bypass",
            "bypass-unknown",
            "abandoned",
            "silent",
            "reserved",
            "left-out",
        )
        for kind in kinds:
            self._alerts.clear(f"{kind}:{path}")

    async def stop_all(self) -> None:
        """Unmounts every root, all at once."""
        async with trio.open_nursery() as nursery:
            for supervisor in list(self.supervisors.values()):
                nursery.start_soon(supervisor.stop)

    async def leave_all(self) -> None:
        """Lets go of every root; their workers serve on."""
        async with trio.open_nursery() as nursery:
            for supervisor in list(self.supervisors.values()):
                nursery.start_soon(supervisor.leave)

    def close(self, *, leaving: bool) -> None:
        """End the process that was kept ready to become a worker. ``leaving``: it goes on to hold sessions for the next daemon,
        as it does for a root that could not be unmounted."""
        states = {supervisor.state for supervisor in self.supervisors.values()}
        self._spare.close(leave=leaving or not states <= {"unmounted"})

    async def _session_started(self, path: str, worker: Worker) -> None:
        if self.reconcile_new_sessions:
            await self._snapshots.reconcile(path, worker)
        self.on_mounted()

    def _own_pids(self, root: str) -> set[int]:
        """Processes that hold the backing directory by design: a worker to adopt, captures of a predecessor, and those that
        hold its session.

        A worker whose mount is gone is not among them: it writes for a job that has files open, and goes round us.
        """
        pids = {record.capture_pid for record in self._runtime.read_pending()}
        if is_mounted(root):
            pids.add(peer_pid(self._runtime.worker_socket(root)) or 0)
        return pids | (self._sessions.holders if self._sessions is not None else set())

    def _options(self, root: RootSettings) -> WorkerOptions:
        """What the worker is told. Its block size must be the repository's: dirty blocks are stored as they are tracked."""
        return WorkerOptions(
            root=root.path,
            socket=self._runtime.worker_socket(root.path),
            driver=root.driver,
            block_bytes=self._store().block_bytes(),
            undo_limit_bytes=self._settings().undo_limit_bytes,
            tracked_names=self._settings().overlay.tracked_names,
            mapped_names=self._settings().overlay.mapped_names,
            captures_trace=may_trace(),  # captures are started by this process
        )
