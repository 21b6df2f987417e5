"""How a supervisor reaches processes and mounts: what lies over a root is found, served, gone on with, or taken off.

Guarantees: whatever may block runs in a thread; descriptors that are handed in are closed by whom the method says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Protocol

import structlog
import trio

from ciuic.bypass import Bypasser, find_bypassing
from ciuic.daemon.mount_watch import unmounted
from ciuic.daemon.recovery import detach_dead, is_mounted, is_orphaned, open_root, recover_root
from ciuic.daemon.sessions import SessionStore
from ciuic.daemon.settings import RootSettings
from ciuic.daemon.worker_process import Worker, WorkerOptions, start_worker
from ciuic.errors import CiuicError
from ciuic.fuse_layer.standby import SpareProcess

MAX_LOOKS = 4
"""Threads that look through /proc at a time, those included that were given up and still wait: they must not use up the threads
that everything else in the daemon needs."""
log = structlog.get_logger(__name__)


class MountHooks(Protocol):
    """How the supervisor reaches processes and mounts; the real ones are ``RealMounts``."""

    async def establish(self, settings: RootSettings) -> Worker: ...
    async def prepare_successor(self) -> None: ...
    async def succeed(self, settings: RootSettings, dead: Worker, *, plain: bool) -> Worker: ...
    async def forget(self, root: str) -> None: ...
    async def detach_dead(self, root: str) -> None: ...
    async def is_mounted(self, root: str) -> bool: ...
    async def unmounted(self, root: str) -> None: ...
    async def bypassing(
        self, root: str, ignore_pids: Collection[int], only_pids: Collection[int] | None
    ) -> list[Bypasser]: ...


class RealMounts:
    """Recovery, worker processes and /proc, each in threads where it may block."""

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

    async def establish(self, settings: RootSettings) -> Worker:
        options = self._options(settings)
        left = self._kept.take(settings.path) if self._kept is not None else None
        adopted = None
        if left is not None:
            adopted = await _go_on(options, *left, spare=self._spare)
        if adopted is None:
            adopted = await trio.to_thread.run_sync(recover_root, settings.path, options.socket)
        if adopted is None:
            backing_fd = await trio.to_thread.run_sync(open_root, settings.path, abandon_on_cancel=True)
            # One that is ready is used where it is there: the root is without protection meanwhile.
            adopted = await start_worker(options, backing_fd, spare=self._spare)
        await self._prepared_for_its_death(adopted, options)
        return adopted

    async def prepare_successor(self) -> None:
        """Wait until the process that forks workers is ready, as far as there can be one; no error without."""
        if self._spare is not None and not await trio.to_thread.run_sync(self._spare.await_ready):
            log.warning("no_process_ready_to_fork")

    async def succeed(self, settings: RootSettings, dead: Worker, *, plain: bool) -> Worker:
        """A worker that goes on with the session of one that ended. ``plain``: it tracks nothing."""
        options = self._options(settings)._replace(plain=plain)
        backing_fd = os.dup(dead.backing_fd)
        successor = await start_worker(options, backing_fd, dead.session_fd, spare=self._spare)
        await self._prepared_for_its_death(successor, options)
        return successor

    async def forget(self, root: str) -> None:
        """The root is unmounted, or its session given up: with somebody who holds it a mount that nobody serves hangs."""
        if self._kept is not None:
            await self._kept.drop(root)

    async def _prepared_for_its_death(self, worker: Worker, options: WorkerOptions) -> None:
        if worker.session_fd is None:
            return
        if self._spare is not None:
            with trio.CancelScope(shield=True):  # the caller learns of a worker that was started
                await trio.to_thread.run_sync(self._spare.prepare)
        if self._kept is not None:
            await self._kept.keep(options, worker)

    async def detach_dead(self, root: str) -> None:
        await trio.to_thread.run_sync(detach_dead, root)

    async def is_mounted(self, root: str) -> bool:
        return await trio.to_thread.run_sync(is_mounted, root)

    async def unmounted(self, root: str) -> None:
        """Return when no overlay of ours is over ``root`` any more."""
        await unmounted(root)

    async def bypassing(
        self, root: str, ignore_pids: Collection[int], only_pids: Collection[int] | None
    ) -> list[Bypasser]:
        """``only_pids``: no others are looked at. May be cancelled: a process can keep a reader of its /proc waiting."""

        def work() -> list[Bypasser]:
            own_pids = {*ignore_pids, *self._own_pids(root)}
            return find_bypassing(root, ignore_pids=own_pids, only_pids=only_pids)

        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._looking)


async def _go_on(
    options: WorkerOptions, session_fd: int, backing_fd: int, *, spare: SpareProcess | None
) -> Worker | None:
    """Goes on with a session whose worker died while no daemon ran. None where there is nothing to go on with; closes both
    descriptors."""
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
