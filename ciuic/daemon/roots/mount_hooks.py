"""Access of a supervisor to processes and mounts: find, serve, take over, watch or detach the overlay of a root.

Guarantees: everything that may block runs in a thread; each method says which side closes descriptors that
are handed in. A mount that any process may still answer is never detached. Leaves supervising to
supervisor.py.

A root that the daemon begins to serve is in one of five cases: no overlay (mount one); a live worker of a
predecessor (adopt it); a session that is held and has no worker, or one that hangs (start a successor); dead
mounts of killed workers, perhaps several on top of one another (detach them); an overlay that another process
serves (refuse, and touch nothing). A case can become another one at any step, when a process is killed. So a
held session is released only when its worker has answered and a keeper has it, or when it is given up.

An overlay that another process unmounts is detected by poll(2) on /proc/self/mountinfo, which reports that
some mount came or went (proc_pid_mountinfo(5)); the file is then read once. It is detected within
`_SETTLE_SECONDS` and the time of one read; a host that mounts and unmounts all the time costs one read for
each `_SETTLE_SECONDS`.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol

import structlog
import trio

from ciuic.config import RootConfig, check_root, raise_for
from ciuic.daemon.base.settings import RootSettings
from ciuic.daemon.roots.sessions import SessionStore
from ciuic.daemon.roots.worker_process import (
    OverlayWorker,
    ServedElsewhere,
    WorkerOptions,
    adopt_worker,
    start_worker,
    stop_workers,
)
from ciuic.errors import Busy, CiuicError, NotFound, UsageError
from ciuic.fuse_layer.journal.succession import PLAIN_AFTER_DEATHS, pause_seconds
from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.fuse_layer.system import mounts
from ciuic.fuse_layer.system.mounts import MovedMounts, mounts_in_overlay_at
from ciuic.protocol.worker_client import WorkerControlClient, WorkerUnreachable, peer_pid
from ciuic.system import mountinfo
from ciuic.system.bypass import Bypasser, BypassingMount, find_bypassing, find_bypassing_mounts
from ciuic.system.open_files import MountUser, mount_users
from ciuic.system.poll import readable

# Pause between two reads: container runtimes change tens of mounts at a time, and a thousand mounts take a
# millisecond to parse.
_SETTLE_SECONDS: Final = 0.1
# A dead mount answers ENOTCONN at once; one that does not answer in time hangs, and must not be detached.
_PROBE_TIMEOUT_SECONDS = 5.0
# Probes in a row without an answer, after which a worker counts as hung.
_SILENCES: Final = 3
# A bound for the loop over mounts that lie on top of one another.
_MAX_STACKED = 64
# Threads that search through /proc at a time, including abandoned ones that still wait: they must not use up
# the threads that everything else in the daemon needs.
_MAX_LOOKS = 4
log = structlog.get_logger(__name__)


async def unmounted(root: str) -> None:
    """Wait until no overlay of ciuic is mounted at `root`.

    Raises:
        OSError: the process is out of descriptors.
    """
    with open("/proc/self/mountinfo", "rb") as file, select.epoll() as changes:  # noqa: ASYNC230  no disk is behind it
        # trio waits for readability only. The file itself reports POLLPRI, so it is watched through an epoll
        # descriptor.
        changes.register(file.fileno(), select.EPOLLPRI)
        while await trio.to_thread.run_sync(mounts.overlay_at, os.fsencode(root)) is not None:
            await trio.lowlevel.wait_readable(changes.fileno())
            changes.poll(0)
            await trio.sleep(_SETTLE_SECONDS)


def _kill_hung(worker_socket: Path) -> bool:
    """Kill the worker that listens if it answers none of `_SILENCES` probes; return whether none serves now.

    For a worker whose session outlives it. Blocks for `_SILENCES * _PROBE_TIMEOUT_SECONDS` at most.
    """
    pid = peer_pid(worker_socket)
    if pid is None:
        return True
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        for _ in range(_SILENCES):
            with WorkerControlClient(worker_socket, timeout_seconds=_PROBE_TIMEOUT_SECONDS) as client:
                try:
                    client.alive()
                except WorkerUnreachable:
                    continue
                return False
        # A process that still listens under this number is the one that the pidfd was opened for.
        if peer_pid(worker_socket) == pid:
            log.error("worker_hangs", pid=pid, silences=_SILENCES)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return readable(pidfd, _PROBE_TIMEOUT_SECONDS)
    finally:
        os.close(pidfd)
    return True


def detach_dead(root: str) -> int:
    """Detach every dead overlay over `root`, and return their number.

    Raises:
        Busy: an overlay there is not dead.
        CiuicError: there are more than `_MAX_STACKED`.
    """
    for count in range(_MAX_STACKED):
        entry = mounts.overlay_at(root)
        if entry is None:
            return count
        liveness = mounts.probe(root, _PROBE_TIMEOUT_SECONDS)
        if liveness != "dead":
            raise Busy(
                f"{root} is served by another ciuic"
                + (" that does not answer" if liveness == "hung" else ""),
                hint="stop the daemon that serves it; if there is none: umount -l " + root,
            )
        lost = mounts.detach_keeping_inside(root)
        log.warning("dead_mount_detached", root=root, mount_id=entry.mount_id)
        if lost:
            log.error("mounts_inside_lost", root=root, mounts=lost)
    raise CiuicError(f"{root} has more than {_MAX_STACKED} dead overlays on it", hint=f"umount -l {root}")


def _open_root(root: str) -> int:
    """Return the backing descriptor of `root`.

    Raises:
        UsageError: `ciuic protect` would refuse it, or it is gone since the configuration named it.
        CiuicError: it cannot be opened.
    """
    try:
        raise_for(check_root(RootConfig(Path(root)), mountinfo.read()))
        return mounts.open_backing(root)
    except NotFound as error:
        raise UsageError(error.message, hint=error.hint) from None
    except OSError as error:
        kind = UsageError if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else CiuicError
        raise kind(f"{root} cannot be opened: {os.strerror(error.errno or 0)}") from error


def is_mounted(root: str) -> bool:
    """Return whether an overlay of ciuic, dead or alive, is over `root`."""
    return mounts.overlay_at(root) is not None


class MountHooks(Protocol):
    """Operations of a supervisor on processes and mounts.

    `RealMounts` implements them, and so do fakes in tests.
    """

    async def establish(self, settings: RootSettings) -> OverlayWorker: ...
    async def recover(self, settings: RootSettings) -> OverlayWorker | None: ...
    async def prepare_successor(self) -> None: ...
    async def succeed(self, settings: RootSettings, dead: OverlayWorker, *, plain: bool) -> OverlayWorker: ...
    def hold(self, root: str, worker: OverlayWorker) -> None: ...
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
        self._looking = trio.CapacityLimiter(_MAX_LOOKS)

    async def establish(self, settings: RootSettings) -> OverlayWorker:
        """Return a worker that serves the root.

        It goes on with a kept session, is adopted from a previous daemon, or is started.

        Raises:
            CiuicError: the root cannot be served now.
            OSError: a descriptor or a process could not be had.
        """
        worker = await self.recover(settings)
        if worker is None:
            options = self._options(settings)
            backing_fd = await trio.to_thread.run_sync(_open_root, settings.path, abandon_on_cancel=True)
            # A process that is ready becomes the worker where there is one: the root is unprotected until the
            # worker serves.
            worker = await start_worker(options, backing_fd, spare=self._spare)
            await self._prepared_for_its_death(worker, options)
        return worker

    async def recover(self, settings: RootSettings) -> OverlayWorker | None:
        """Return a worker that goes on with the overlay over a root; None where there can be none.

        Dead overlays are detached then.

        Raises:
            Busy: another process serves an overlay there, or one hangs there.
        """
        options = self._options(settings)
        worker = await self._recovered(options)
        if worker is not None:
            await self._prepared_for_its_death(worker, options)
        return worker

    async def _recovered(self, options: WorkerOptions) -> OverlayWorker | None:
        """Adopt the worker of the overlay over a root, or start one that goes on with its session (`recover`)."""
        root, failures = options.root, 0
        while await self.is_mounted(root):
            # Before anything that takes time: where no keeper has it, the worker's death would end the session.
            if self._kept is not None:
                await self._kept.ask_worker(root, options.socket)
            # Not abandoned on cancellation: a worker that is adopted must become known.
            adopted = await trio.to_thread.run_sync(adopt_worker, options.socket)
            if adopted is not None:
                log.info("worker_adopted", root=root, pid=adopted.pid, session=adopted.session)
                return adopted
            held = self._kept.held(root) if self._kept is not None else None
            if held is None:
                break
            if not await trio.to_thread.run_sync(_kill_hung, options.socket):
                # It answers by now, or will: `detach_dead` touches nothing then.
                break
            pause = pause_seconds(failures)
            if pause is None:
                log.error("session_given_up", root=root, deaths=failures)
                await self.forget(root)
                break
            await trio.sleep(pause)
            session_fd, backing_fd = held
            successor = options._replace(plain=failures >= PLAIN_AFTER_DEATHS)
            try:
                return await start_worker(successor, os.dup(backing_fd), session_fd, spare=self._spare)
            except (CiuicError, OSError) as error:
                log.error("session_not_taken_over", root=root, error=str(error))
                failures += 1
        await self.detach_dead(root)
        # A worker that still serves open handles of a detached mount may listen there, or one whose overlay was moved with a
        # directory above it. It need not be reached any more.
        await trio.to_thread.run_sync(stop_workers, [options.socket])
        options.socket.unlink(missing_ok=True)
        return None

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
                await trio.to_thread.run_sync(_kill_hung, options.socket)
                raise
            log.info("worker_adopted", root=settings.path, pid=adopted.pid)
            successor = adopted
        await self._prepared_for_its_death(successor, options)
        return successor

    def hold(self, root: str, worker: OverlayWorker) -> None:
        """Hold the session of a worker that is going to be closed, for the next `establish` of its root.

        It may die before it is adopted, and what other holders have cannot be taken back from them.
        """
        if self._kept is not None:
            self._kept.hold(root, worker)

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
            found = find_bypassing(root, ignore_pids=own_pids, only_pids=only_pids)
            # A capture may have begun meanwhile, and its number is written down by now.
            begun = self._own_pids(root) if found else ()
            return [process for process in found if process.pid not in begun]

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
