"""Cut the epochs of all roots of a snapshot at one instant, leave out what was lost, and settle each epoch.

Before the cut the kernel's write-back cache is flushed, and files that are written past the overlay get a
moment to be closed.

When a worker is killed, its successor goes on with what was sealed if it can
(fuse_layer/tracking/undo_log.py), and the capture begins again. Otherwise a sealed epoch ends with its
worker, with a worker that leaves its session to another one, and with an undo log that met a full disk. Its root
is left out of the snapshot then; a snapshot without any root is lost.

Guarantees:

* Either every root's epoch was cut while changing operations were held on all of them, or none counts (those
  already cut are given back to their workers).
* No hold outlives its timeout, also when the daemon is killed.
* Everything whose write() had returned when `flush` began is in the cut, unless `flush` says otherwise.
* A root whose sealed epoch no worker has within `PATIENCE_SECONDS` after its worker ended is left out, with the
  reason.
* A worker is told `committed` of an epoch only when the snapshot has its root; `abort` gives the changes to the
  next epoch. Leaves to others: which epochs a worker was not told of (`Snapshots.reconcile`).

Belongs to the trio thread, where a function does not say that it blocks.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
import trio

from ciuic.daemon.base.repository_store import LastSnapshot, Store
from ciuic.daemon.base.runtime import CutRecord, RuntimeDirectory
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerClient
from ciuic.daemon.snapshots.flush_helper import VANISHED
from ciuic.daemon.snapshots.pending import PendingSnapshot, SnapshotCut
from ciuic.errors import CiuicError, NotFound
from ciuic.protocol.worker_frames import USE_OF_HOLD_SECONDS
from ciuic.system.child_process import program_environment, script_command
from ciuic.types import SetMember

# Longest wait of a hold for the operations in flight, by attempt. While it waits, every other change of the
# job waits too, so one slow operation (an unlink that frees gigabytes) must not stop the rest: release soon,
# and try again later.
_HOLDS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0)
# Pauses between the attempts.
CUT_PAUSES_SECONDS = (0.1, 0.5, 1.0, 2.0)
# A cut without a complete flush is better than none: the snapshot is tagged "unflushed" then.
_FLUSH_TIMEOUT_SECONDS = 60.0
# Longest wait of a snapshot for a checkpoint that is being saved past the overlay: most saves end within it.
PREPARE_SECONDS = 2.0
# Rounds in which names that vanished between the worker's answer and the open (renames) are asked for again.
_FLUSH_ROUNDS = 5
# A worker that died is replaced within 0.1 s as a rule; a request need not fail for that.
_MOUNT_PATIENCE_SECONDS = 10.0
# A script and not a module: it is started for every cut with open files, and imports nothing but what it
# needs.
_HELPER = Path(__file__).with_name("flush_helper.py")
# Tag of a snapshot for which the kernel's cached writes could not all be written back in time.
TAG_UNFLUSHED = "unflushed"
# Longest wait for a root to be served again: twice the longest pause between two attempts to mount it
# (RESTART_SECONDS).
PATIENCE_SECONDS = 60.0
# A worker is replaced within 0.1 s as a rule, and its supervisor announces no event that covers every way of
# replacing one.
_POLL_SECONDS = 0.05
log = structlog.get_logger(__name__)

Flush = Callable[[str, OverlayWorker], Awaitable[bool]]


class RootCut(NamedTuple):
    """Part of one root in a cut."""

    path: str
    session: str
    epoch: int
    cut_ns: int
    hold_us: int


class CutFailed(CiuicError):
    """Error: a worker did not answer, or its operations in flight did not end in time."""


async def flush(root: str, worker: OverlayWorker) -> bool:
    """Write back the kernel's cache of one mount.

    Return False, with a log entry, when that could not be finished in time.
    """
    status: int | None = None
    with trio.move_on_after(_FLUSH_TIMEOUT_SECONDS) as scope:
        for _ in range(_FLUSH_ROUNDS):
            names = await worker.ask(lambda client: client.writers())
            # A file without a writable handle was flushed by its last close. Without any such file no process
            # need be started. syncfs(2) alone would not do: after 30 MiB of cached writes it returned after
            # 14 ms with 0 bytes arrived at a server that takes 50 ms for a write; opening and closing the
            # file took 159 ms, with all of them (docs/decisions/flush-before-the-cut.md).
            status = await _run_helper(root, names) if names else 0
            if status != VANISHED:
                break
        # Names that still change after so many rounds are of files that live for milliseconds, and each close
        # flushes.
    if scope.cancelled_caught:
        log.warning("flush_timed_out", root=root, timeout_seconds=_FLUSH_TIMEOUT_SECONDS)
        return False
    if status not in (0, VANISHED):
        log.warning("flush_failed", root=root, exit_status=status)
        return False
    return True


async def prepare(root: str, worker: OverlayWorker) -> None:
    """Wait a moment for writers that the overlay does not see. A worker that cannot wait is cut as it is."""

    def work() -> None:
        # A connection of its own: the standing one is for the requests that go on meanwhile.
        client = worker.connect()
        try:
            client.prepare(PREPARE_SECONDS)
        finally:
            client.close()

    try:
        # Abandoned on cancellation: nothing depends on its result, and a worker that hangs would keep the
        # snapshot waiting.
        await trio.to_thread.run_sync(work, abandon_on_cancel=True)
    except CiuicError as error:
        log.warning("prepare_failed", root=root, error=str(error))


async def _run_helper(root: str, names: Sequence[bytes]) -> int:
    """Run the flush helper and return its exit status."""
    process = await trio.lowlevel.open_process(
        script_command(str(_HELPER), root),
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env=program_environment(),
    )
    assert process.stdin is not None
    try:
        try:
            async with process.stdin:
                await process.stdin.send_all(b"\0".join(names))
        except trio.BrokenResourceError:
            log.debug("flush_helper_ended_early", root=root)  # its exit status says how
        return await process.wait()
    except trio.Cancelled:
        # Not waited for: it may hang as long as the mount does.
        process.kill()
        raise


async def mounted_roots(
    known: Mapping[str, RootSupervisor], wanted: Sequence[str]
) -> tuple[list[RootSupervisor], list[str]]:
    """Return the wanted roots that are mounted, and the paths of those that are not.

    Args:
        known: supervisors of all roots, by path.
        wanted: paths of the roots to cut; empty: all.

    Raises:
        NotFound: a wanted root is not known.
        UsageError: roots are not mounted because their directories are gone.
        CiuicError: a root that is wanted by name is not mounted, or no root is.
    """
    for path in wanted:
        if path not in known:
            raise NotFound(f"{path} is not a protected root", hint="ciuic status names them")
    chosen = [known[path] for path in (dict.fromkeys(wanted) if wanted else known)]
    with trio.move_on_after(_MOUNT_PATIENCE_SECONDS):
        for supervisor in chosen:
            await supervisor.not_in_transition()
    mounted = [supervisor for supervisor in chosen if supervisor.worker is not None]
    absent = [supervisor.path for supervisor in chosen if supervisor.worker is None]
    if absent and (wanted or not mounted):
        fault = {known[path].fault for path in absent}
        kind = fault.pop() if len(fault) == 1 else CiuicError
        raise kind(f"not mounted: {', '.join(absent)}", hint="ciuic status says why")
    if not mounted:
        raise CiuicError("no root is protected", hint="protect one: ciuic protect PATH")
    return mounted, absent


async def flush_all(supervisors: Sequence[RootSupervisor], flush_one: Flush) -> bool:
    """Flush and prepare all roots at once. Return whether every one was flushed."""
    results: list[bool] = []

    async def one(supervisor: RootSupervisor, worker: OverlayWorker) -> None:
        try:
            results.append(await flush_one(supervisor.path, worker))
        except CiuicError as error:
            log.warning("flush_failed", root=supervisor.path, error=str(error))
            results.append(False)

    async with trio.open_nursery() as nursery:
        for supervisor in supervisors:
            if supervisor.worker is not None:
                nursery.start_soon(one, supervisor, supervisor.worker)
                nursery.start_soon(prepare, supervisor.path, supervisor.worker)
    return len(results) == len(supervisors) and all(results)


@asynccontextmanager
async def cut_all(
    supervisors: Sequence[RootSupervisor], turn: Callable[[], AbstractAsyncContextManager[None]]
) -> AsyncIterator[list[RootCut]]:
    """Cut all roots at one instant, on connections of their own. Between the cut and the block there is no await.

    A worker that dies meanwhile costs an attempt, not the snapshot: each attempt takes the workers that serve
    by then.

    Args:
        supervisors: the roots.
        turn: taken for each attempt, not for the pauses between them; that of the cut lasts until the block
            ends.

    Raises:
        CutFailed: a worker ended or did not answer, or its operations in flight did not end in time.
    """
    for hold_seconds, pause_seconds in zip(_HOLDS_SECONDS, (*CUT_PAUSES_SECONDS, None), strict=True):
        async with turn():
            try:
                workers = _serving(supervisors)
                # The thread is not abandoned on cancellation: an epoch that is cut must become known.
                cuts = await trio.to_thread.run_sync(_cut_on_new_connections, workers, hold_seconds)
            except CutFailed as error:
                if pause_seconds is None:
                    raise
                log.warning("cut_tried_again", error=str(error))
            else:
                yield cuts
                return
        await trio.sleep(pause_seconds)


def _serving(supervisors: Sequence[RootSupervisor]) -> list[tuple[str, OverlayWorker]]:
    """Return the workers that serve now; raise CutFailed where a root has none."""
    workers = [(supervisor.path, supervisor.worker) for supervisor in supervisors]
    serving = [(path, worker) for path, worker in workers if worker is not None]
    if len(serving) < len(workers):
        raise CutFailed("an overlay worker ended during the snapshot", hint="try again")
    return serving


def _cut_on_new_connections(
    workers: Sequence[tuple[str, OverlayWorker]], hold_seconds: float
) -> list[RootCut]:
    """Cut the epochs of these workers, and of no successor of one.

    Blocks; may raise CutFailed and CiuicError.
    """
    hold = _hold_on_new_connections(workers, hold_seconds)
    try:
        return _with_sessions(hold.cut(), workers)
    finally:
        hold.close()


def _hold_on_new_connections(workers: Sequence[tuple[str, OverlayWorker]], hold_seconds: float) -> RootsHold:
    """Hold the roots of these workers, and of no successor of one. Blocks; may raise CutFailed and CiuicError."""
    parts = [(path, worker.connect()) for path, worker in workers]
    hold = RootsHold(parts)
    try:
        for (path, worker), (_, client) in zip(workers, parts, strict=True):
            _check_session(path, worker, client)
        hold.begin(hold_seconds)
    except BaseException:
        hold.close()
        raise
    return hold


def _with_sessions(cuts: Sequence[RootCut], workers: Sequence[tuple[str, OverlayWorker]]) -> list[RootCut]:
    sessions = {path: worker.session for path, worker in workers}
    return [cut._replace(session=sessions[cut.path]) for cut in cuts]


def _check_session(path: str, worker: OverlayWorker, client: WorkerClient) -> None:
    """Raise CutFailed unless this connection leads to this worker."""
    try:
        session = client.status().session
    except CiuicError as error:
        raise CutFailed(f"no snapshot could be cut: {path}: {error}", hint=error.hint) from error
    # A successor listens at the same path before its supervisor knows of it, and counts epochs from 1 again:
    # cut under its predecessor's session, its epoch 1 was taken for that of a snapshot that was committed
    # long ago.
    if session != worker.session:
        raise CutFailed(
            f"no snapshot could be cut: the overlay worker of {path} was replaced", hint="try again"
        )


class RootsHold:
    """A hold of all changing operations of several roots. Blocks; for one thread at a time.

    Args:
        parts: path and connection of each root; a connection is used for nothing else, because a hold belongs
            to it.
        clock: monotonic clock.
    """

    def __init__(
        self, parts: Sequence[tuple[str, WorkerClient]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._parts = parts
        self._clock = clock

    def begin(self, seconds: float) -> None:
        """Hold all roots; each worker ends its hold by itself after this time.

        Raises:
            CutFailed: a root could not be held; none is then.
        """
        held: list[WorkerClient] = []
        failed_root = ""
        try:
            for root, client in self._parts:
                failed_root = root
                # Before the hold, which may fail half-way: releasing what is not held does nothing.
                held.append(client)
                client.hold(seconds)
        except BaseException as error:
            _release_all(held)
            if not isinstance(error, CiuicError):
                raise
            raise _not_cut(failed_root, error) from error

    def cut(self) -> list[RootCut]:
        """Cut all roots and release all. `RootCut.session` is left empty.

        Raises:
            CutFailed: a root could not be cut, or the first may have been released before the last was cut. No
                epoch counts as sealed then.
        """
        done: list[RootCut] = []
        failure: CiuicError | None = None
        root = ""
        try:
            began = self._clock()
            for root, client in self._parts:
                reply = client.cut()
                done.append(RootCut(root, "", reply.epoch, reply.cut_ns, reply.hold_us))
            # A worker ends a hold by itself after USE_OF_HOLD_SECONDS, so that a daemon that dies here stops no
            # job. The first root may have gone on by now, and the epochs would not be of one instant.
            if self._clock() - began > USE_OF_HOLD_SECONDS:
                failure = CiuicError("the cuts took longer than the first root was held")
        except CiuicError as error:
            failure = error
        finally:
            _release_all([client for _, client in self._parts])
        if failure is None:
            return done
        # The epochs that were cut before the failure; the roots after it have none.
        for part, (_, client) in zip(done, self._parts, strict=False):
            _quietly(partial(client.abort, part.epoch))
        raise _not_cut(root, failure) from failure

    def close(self) -> None:
        """End the connections, and with them a hold that is in force. Never blocks."""
        for _, client in self._parts:
            client.close()


def _not_cut(root: str, error: CiuicError) -> CutFailed:
    return CutFailed(f"no snapshot could be cut: {root}: {error}", hint=error.hint)


def cut_together(
    parts: Sequence[tuple[str, WorkerClient]],
    *,
    hold_seconds: float = _HOLDS_SECONDS[-1],
    clock: Callable[[], float] = time.monotonic,
) -> list[RootCut]:
    """Hold all roots, cut all, release all. Blocks; run in a thread. `RootCut.session` is left empty.

    Args:
        parts: as in `RootsHold`.
        hold_seconds: longest wait for the operations in flight.
        clock: monotonic clock.

    Raises:
        CutFailed: as `RootsHold.begin` and `RootsHold.cut`.
    """
    hold = RootsHold(parts, clock)
    hold.begin(hold_seconds)
    return hold.cut()


class HoldReleased(CiuicError):
    """Error: a hold was released without a cut, because its holder asked for that or did not decide in time."""


class HeldCut:
    """A cut in two steps: all roots are held, then somebody decides whether they are cut.

    Guarantees: the cut lies within one unbroken hold of every root, or there is none (`RootsHold.cut`, whose
    workers refuse what comes after their deadline). No hold outlives the limit by more than the cut itself,
    whatever happens to the one who decides or to this daemon.

    Args:
        limit_seconds: longest hold.
        member: place of the snapshot in its set.
        flushed: the caches were written back before (`Snapshots.flush`).
    """

    def __init__(self, limit_seconds: float, member: SetMember, *, flushed: bool) -> None:
        self.limit_seconds = limit_seconds
        self.member = member
        self.flushed = flushed
        self.settled = trio.Event()
        """Set when all roots are held, and when that has failed."""
        self._decided = trio.Event()
        self._cuts = False

    def decide(self, *, cut: bool) -> None:
        """Cut, or release; only the first decision counts."""
        if not self._decided.is_set():
            self._cuts = cut
            self._decided.set()

    @asynccontextmanager
    async def cut(
        self, supervisors: Sequence[RootSupervisor], turn: Callable[[], AbstractAsyncContextManager[None]]
    ) -> AsyncIterator[list[RootCut]]:
        """Do what `cut_all` does, once, when it is decided. Other cuts wait for it, for the limit at most.

        Raises:
            HoldReleased: nothing was cut.
            CutFailed: the roots could not be held, or not cut before their holds ended.
        """
        async with turn():
            workers = _serving(supervisors)
            hold = await trio.to_thread.run_sync(_hold_on_new_connections, workers, self.limit_seconds)
            try:
                self.settled.set()
                with trio.move_on_after(self.limit_seconds):
                    await self._decided.wait()
                if not self._cuts:
                    self._decided.set()
                    raise HoldReleased("the hold was released without a cut")
                # The thread is not abandoned on cancellation: an epoch that is cut must become known.
                cuts = await trio.to_thread.run_sync(hold.cut)
            finally:
                hold.close()
            yield _with_sessions(cuts, workers)


def _release_all(clients: Sequence[WorkerClient]) -> None:
    """Release all holds at the same time."""
    # A worker answers when it has written its sealed file, and no other root should stay held for so long.
    # The first is released in this thread, so that a snapshot of one root starts none.
    threads = [threading.Thread(target=_quietly, args=(client.release,)) for client in clients[1:]]
    for thread in threads:
        thread.start()
    for client in clients[:1]:
        _quietly(client.release)
    for thread in threads:
        thread.join()


def _quietly(call: Callable[[], None]) -> None:
    """Call a clean-up and log its failure.

    What it does also happens without it: a hold ends with its connection, an epoch with the next start.
    """
    try:
        call()
    except CiuicError as error:
        log.warning("cut_cleanup_failed", error=str(error))


class CutTurns:
    """Serialises the preparation of cuts by user, and the cuts themselves, administrators first.

    A user is a uid, or None for administrators and the schedule.

    Before a cut the caches of its roots are flushed, and writers past the overlay get a moment to finish: seconds
    that the owner of a root can draw out. So each ordinary user has a turn of their own for that, and only the
    cut itself is made under one lock, administrators and the schedule first: 50 threads of one owner left
    another one 3 cuts of 15, and root waited for 13 s.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._of_users: defaultdict[int | None, trio.Lock] = defaultdict(trio.Lock)
        # Administrators that wait for the lock; while there are any, no ordinary user keeps it.
        self._first = 0
        self._none_first = trio.Event()

    @asynccontextmanager
    async def of(self, user: int | None) -> AsyncIterator[None]:
        """Let this user's requests prepare their cuts one after the other."""
        lock = self._of_users[user]
        async with lock:
            yield
        if not lock.locked():
            self._of_users.pop(user, None)

    @asynccontextmanager
    async def cut(self, user: int | None) -> AsyncIterator[None]:
        """Let one cut at a time be made; hold it until the queue has the cut, whose order is the queue's."""
        await self._acquire(user)
        try:
            yield
        finally:
            self._lock.release()

    async def _acquire(self, user: int | None) -> None:
        if user is None:
            self._first += 1
            try:
                await self._lock.acquire()
            finally:
                self._first -= 1
                if not self._first:
                    self._none_first.set()
                    self._none_first = trio.Event()
            return
        while True:
            await self._lock.acquire()
            if not self._first:
                return
            self._lock.release()
            await self._none_first.wait()


@asynccontextmanager
async def make_cut(
    supervisors: Sequence[RootSupervisor],
    flush: Flush,
    turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    *,
    held: HeldCut | None = None,
) -> AsyncIterator[SnapshotCut]:
    """Flush and cut all these roots at one instant.

    There is no await between the cut and the block: an epoch that was cut must be known to the queue before
    anything else happens.

    Args:
        supervisors: the roots.
        flush: flushes one of them.
        turn: held from the cut until the block ends, and not for the flush.
        held: makes the cut when it is decided elsewhere; the roots were flushed before. None: cut now.

    Raises:
        CutFailed: no cut was made in time.
        CiuicError: a worker ended.
    """
    flushed = await flush_all(supervisors, flush) if held is None else held.flushed
    tags = [] if flushed else [TAG_UNFLUSHED]
    for supervisor in supervisors:
        await supervisor.refresh_bypassing()
    trusted = {supervisor.path: not supervisor.bypass.has_gap for supervisor in supervisors}
    # Before the cut: writers past the overlay that are known to be gone now have written all they will, and a
    # capture that compares everything has it.
    unbypassed = {supervisor.path for supervisor in supervisors if supervisor.bypass.all_accounted}
    async with (cut_all if held is None else held.cut)(supervisors, turn) as cuts:
        # Workers may have been replaced since the first look.
        for supervisor in supervisors:
            trusted[supervisor.path] &= not supervisor.bypass.has_gap
        yield SnapshotCut(
            records=[CutRecord(path=cut.path, session=cut.session, epoch=cut.epoch) for cut in cuts],
            time_ns=max(cut.cut_ns for cut in cuts),
            hold_microseconds=max(cut.hold_us for cut in cuts),
            trust_tracking=trusted,
            unbypassed=unbypassed,
            tags=tags,
        )


async def settle_doubt(pending: PendingSnapshot, roots: Callable[[], Mapping[str, RootSupervisor]]) -> None:
    """Find out whether the workers that serve doubtful roots now have the sealed epochs; leave out the others.

    Waits until these roots are served, for `PATIENCE_SECONDS` since the last doubt at most.

    Args:
        pending: snapshot with roots in doubt.
        roots: returns the supervisors of the roots, by path.
    """
    until_seconds = pending.doubtful_since + PATIENCE_SECONDS
    with trio.move_on_at(until_seconds):
        while any(_is_coming(roots().get(path)) for path in pending.doubtful):  # noqa: ASYNC110  see _POLL_SECONDS
            await trio.sleep(_POLL_SECONDS)
    for cut in pending.remaining:
        # Taken out of doubt before the worker is asked: when the worker ends meanwhile, the root is in doubt once
        # more.
        reason = pending.take_doubt(cut.path)
        if reason is None or await _has_epoch(cut, roots, until_seconds) or cut.path in pending.doubtful:
            continue
        log.error("root_left_out", id=pending.id, root=cut.path, error=reason)
        pending.lose(cut.path, reason)


def _is_coming(supervisor: RootSupervisor | None) -> bool:
    """Return whether a root will be served again."""
    if supervisor is None or supervisor.state in ("stopping", "unmounted"):
        return False
    return supervisor.worker is None or supervisor.plain


async def _has_epoch(
    cut: CutRecord, roots: Callable[[], Mapping[str, RootSupervisor]], until_seconds: float
) -> bool:
    """Return whether the worker that serves the root now has the sealed epoch; one that does not answer is asked again."""
    while True:
        supervisor = roots().get(cut.path)
        worker = supervisor.worker if supervisor is not None else None
        if worker is None or worker.session != cut.session:
            return False
        try:
            return cut.epoch in (await worker.ask(lambda client: client.status())).pending
        except CiuicError as error:
            if trio.current_time() >= until_seconds:
                log.warning("worker_not_asked", root=cut.path, error=str(error))
                return False
        # It may have ended, which its supervisor finds out a moment later.
        await trio.sleep(_POLL_SECONDS)


async def tell_workers(
    pending: PendingSnapshot, roots: Mapping[str, RootSupervisor], *, committed: bool
) -> None:
    """Send `committed` or `abort` for each root whose session still lives.

    `abort` for a root that was left out.
    """
    # A root that was left out is aborted although the snapshot is committed: its changes belong to the next
    # snapshot.
    captured = {cut.path for cut in pending.remaining} if committed else set()
    for cut in pending.record.cuts:
        supervisor = roots.get(cut.path)
        worker = supervisor.worker if supervisor else None
        # Epochs count from 1 in each session: another session's worker must not hear of this one.
        if worker is None or worker.session != cut.session:
            continue
        epoch = cut.epoch
        try:
            if cut.path in captured:
                await worker.ask(lambda client, epoch=epoch: client.committed(epoch))  # type: ignore[misc]
            else:
                await worker.ask(lambda client, epoch=epoch: client.abort(epoch))  # type: ignore[misc]
        except CiuicError as error:
            # Not lost: reconcile looks up every epoch that a worker calls pending.
            log.warning(
                "worker_not_told",
                root=cut.path,
                epoch=epoch,
                committed=cut.path in captured,
                error=str(error),
            )


def find_commit(store: Store, cuts: Iterable[CutRecord]) -> tuple[LastSnapshot, frozenset[str]] | None:
    """Return the snapshot that has one of these epochs, and its roots; None where there is none. Blocks.

    May raise CiuicError.
    """
    for cut in cuts:
        snapshot = store.snapshot_of_epoch(cut.path, cut.session, cut.epoch)
        if snapshot is not None:
            return snapshot, store.roots_of(snapshot.id)
    return None


async def settle_epoch(store: Store, path: str, worker: OverlayWorker, epoch: int) -> None:
    """Tell a worker the outcome of an epoch that it calls pending and that belongs to no queued snapshot."""
    try:
        found = await trio.to_thread.run_sync(store.snapshot_of_epoch, path, worker.session, epoch)
        if found is not None:
            await worker.ask(lambda client: client.committed(epoch))
        else:
            await worker.ask(lambda client: client.abort(epoch))
        log.info("epoch_reconciled", root=path, epoch=epoch, snapshot=found.id if found else "")
    except CiuicError as error:
        log.warning("epoch_not_reconciled", root=path, epoch=epoch, error=str(error))


class TrackingTrust:
    """Marks of roots whose tracking has a gap (`BypassWatch.has_gap`), because a process wrote past the overlay.

    Guarantees: a gap is remembered until a snapshot that was cut after the last bypass had ended, and that
    compared everything, is committed; a successor of the daemon knows of it. docs/decisions/trust.md has the
    reasons.
    """

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
            if path in roots and roots[path].bypass.all_accounted:
                roots[path].bypass.has_gap = False
        self.note()

    def note(self) -> None:
        """Write the marks to the runtime directory for a successor, if they have changed."""
        untrusted = {path for path, supervisor in self._roots().items() if supervisor.bypass.has_gap}
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
            supervisor.bypass.has_gap |= paths is None or path in paths
        self.note()
