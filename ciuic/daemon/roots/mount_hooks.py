"""Access of a supervisor to processes and mounts: find, serve, take over or detach the overlay of a root.

Guarantees: everything that may block runs in a thread; each method says which side closes descriptors that
are handed in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Protocol

import structlog
import trio

from ciuic.daemon.base.settings import RootSettings
from ciuic.daemon.roots.mount_watch import unmounted
from ciuic.daemon.roots.recovery import detach_dead, is_mounted, is_orphaned, open_root, recover_root
from ciuic.daemon.roots.sessions import SessionStore
from ciuic.daemon.roots.worker_process import (
    OverlayWorker,
    ServedElsewhere,
    WorkerOptions,
    adopt_worker,
    start_worker,
)
from ciuic.errors import CiuicError
from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.fuse_layer.system.mounts import MovedMounts, mounts_in_overlay_at
from ciuic.system.bypass import Bypasser, BypassingMount, find_bypassing, find_bypassing_mounts
from ciuic.system.open_files import MountUser, mount_users

# Threads that search through /proc at a time, including abandoned ones that still wait: they must not use up
# the threads that everything else in the daemon needs.
MAX_LOOKS = 4
log = structlog.get_logger(__name__)


class MountHooks(Protocol):
    """Operations of a supervisor on processes and mounts.

    `RealMounts` implements them, and so do fakes in tests.
    """

    async def establish(self, settings: RootSettings) -> OverlayWorker: ...
    async def prepare_successor(self) -> None: ...
    async def succeed(self, settings: RootSettings, dead: OverlayWorker, *, plain: bool) -> OverlayWorker: ...
    async def forget(self, root: str) -> None: ...
    async def detach_dead(self, root: str) -> None: ...
    async def is_mounted(self, root: str) -> bool: ...
    async def has_mounts_inside(self, root: str) -> bool: ...
    async def move_mounts_inside(self, root: str, backing_fd: int) -> MovedMounts: ...
    async def unmounted(self, root: str) -> None: ...
    async def users(self, root: str) -> list[MountUser]: ...
    async def bypassing(
        self, root: str, ignore_pids: Collection[int], only_pids: Collection[int] | None
    ) -> list[Bypasser]: ...
    async def bypassing_mounts(self, root: str, ignore_pids: Collection[int]) -> list[BypassingMount]: ...


class RealMounts:
    """Operations on real mounts, worker processes and /proc."""

    def __init__(
        self,
        options: Callable[[RootSettings], WorkerOptions],
        own_pids: Callable[[str], Collection[int]],
        *,
        spare: SpareProcess | None = None,
        kept: SessionStore | None = None,
    ) -> None:
        self._options = options
        self._own_pids = own_pids
        self._spare = spare
        self._kept = kept
        self._looking = trio.CapacityLimiter(MAX_LOOKS)

    async def establish(self, settings: RootSettings) -> OverlayWorker:
        """Return a worker that serves the root.

        It goes on with a kept session, is adopted from a previous daemon, or is started.

        Raises:
            CiuicError: the root cannot be served now.
            OSError: a descriptor or a process could not be had.
        """
        options = self._options(settings)
        # In this order: a kept session without a worker gets a successor, a live worker is adopted, and only
        # where there is neither is a new overlay mounted.
        left = self._kept.take(settings.path) if self._kept is not None else None
        adopted = None
        if left is not None:
            adopted = await _go_on(options, *left, spare=self._spare)
        if adopted is None:
            # Not abandoned on cancellation: a worker that is adopted must become known.
            adopted = await trio.to_thread.run_sync(recover_root, settings.path, options.socket)
        if adopted is None:
            backing_fd = await trio.to_thread.run_sync(open_root, settings.path, abandon_on_cancel=True)
            # A process that is ready becomes the worker where there is one: the root is unprotected until the
            # worker serves.
            adopted = await start_worker(options, backing_fd, spare=self._spare)
        await self._prepared_for_its_death(adopted, options)
        return adopted

    async def prepare_successor(self) -> None:
        """Wait until the process that forks workers is ready. Log a warning where there is none."""
        if self._spare is not None and not await trio.to_thread.run_sync(self._spare.await_ready):
            log.warning("no_process_ready_to_fork")

    async def succeed(self, settings: RootSettings, dead: OverlayWorker, *, plain: bool) -> OverlayWorker:
        """Start a worker that goes on with the session of a dead one, or adopt one that does so already.

        Args:
            settings: settings of the root.
            dead: worker that ended.
            plain: the worker tracks nothing.
        """
        options = self._options(settings)._replace(plain=plain)
        # A duplicate: start_worker takes it over in every case, and `dead` closes its own.
        backing_fd = os.dup(dead.backing_fd)
        try:
            successor = await start_worker(options, backing_fd, dead.session_fd, spare=self._spare)
        except ServedElsewhere:
            # A keeper has started one. As a failure this would count towards giving the session up.
            adopted = await trio.to_thread.run_sync(adopt_worker, options.socket)
            if adopted is None:
                raise
            log.info("worker_adopted", root=settings.path, pid=adopted.pid)
            successor = adopted
        await self._prepared_for_its_death(successor, options)
        return successor

    async def forget(self, root: str) -> None:
        """Have every holder release the session of a root that is unmounted or given up.

        A mount that no worker serves hangs while any process holds its session, and is dead only after that.
        """
        if self._kept is not None:
            await self._kept.drop(root)

    async def _prepared_for_its_death(self, worker: OverlayWorker, options: WorkerOptions) -> None:
        if worker.session_fd is None:
            return
        if self._spare is not None:
            # Shielded: the caller must learn of a worker that was started.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._spare.prepare)
        if self._kept is not None:
            await self._kept.keep(options, worker)

    async def detach_dead(self, root: str) -> None:
        """Detach every dead overlay over `root`."""
        await trio.to_thread.run_sync(detach_dead, root)

    async def is_mounted(self, root: str) -> bool:
        """Return whether an overlay of ciuic, dead or alive, is over `root`."""
        return await trio.to_thread.run_sync(is_mounted, root)

    async def has_mounts_inside(self, root: str) -> bool:
        """Return whether others have mounted anything inside the overlay over `root`."""
        return bool(await trio.to_thread.run_sync(mounts_in_overlay_at, root))

    async def move_mounts_inside(self, root: str, backing_fd: int) -> MovedMounts:
        """Move what others mounted inside the overlay to the plain directory.

        Raises:
            MountsInside: one of them cannot be moved; all are where they were.
        """
        return await trio.to_thread.run_sync(MovedMounts, root, backing_fd)

    async def unmounted(self, root: str) -> None:
        """Wait until no overlay of ciuic is over `root`."""
        await unmounted(root)

    async def users(self, root: str) -> list[MountUser]:
        """Return the processes that are in the mount over `root`. May be cancelled."""
        return await trio.to_thread.run_sync(mount_users, root, abandon_on_cancel=True, limiter=self._looking)

    async def bypassing(
        self, root: str, ignore_pids: Collection[int], only_pids: Collection[int] | None
    ) -> list[Bypasser]:
        """Return the processes that reach `root` past its overlay.

        May be cancelled: a process can block readers of its /proc.

        Args:
            root: path of the root.
            ignore_pids: processes that are no bypasses.
            only_pids: look at these processes only; None: at all.
        """

        def work() -> list[Bypasser]:
            own_pids = {*ignore_pids, *self._own_pids(root)}
            return find_bypassing(root, ignore_pids=own_pids, only_pids=only_pids)

        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._looking)

    async def bypassing_mounts(self, root: str, ignore_pids: Collection[int]) -> list[BypassingMount]:
        """Return the mounts by which `root` is reached past its overlay. May be cancelled.

        Args:
            root: path of the root.
            ignore_pids: processes whose mount namespaces do not count.
        """

        def work() -> list[BypassingMount]:
            return find_bypassing_mounts(root, ignore_pids={*ignore_pids, *self._own_pids(root)})

        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._looking)


async def _go_on(
    options: WorkerOptions, session_fd: int, backing_fd: int, *, spare: SpareProcess | None
) -> OverlayWorker | None:
    """Start a worker for a session whose worker died while no daemon ran. Closes both descriptors.

    Return None where the session is served or over, or no worker could be started.
    """
    try:
        orphaned = await trio.to_thread.run_sync(is_orphaned, options.root, options.socket)
        if orphaned:
            return await start_worker(options, os.dup(backing_fd), session_fd, spare=spare)
    except (CiuicError, OSError) as error:
        log.error("session_not_taken_over", root=options.root, error=str(error))
    finally:
        os.close(session_fd)
        os.close(backing_fd)
    return None
