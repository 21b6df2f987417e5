"""Cut the epochs of all roots of a snapshot at one instant.

Before the cut the kernel's write-back cache is flushed, and files that are written past the overlay get a
moment to be closed.

Guarantees: either every root's epoch was cut while changing operations were held on all of them, or none
counts (those already cut are given back to their workers). No hold outlives its timeout, also when the daemon
is killed. Everything whose write() had returned when `flush` began is in the cut, unless `flush` says
otherwise.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
import trio

from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerClient
from ciuic.daemon.snapshots.flush_helper import VANISHED
from ciuic.errors import CiuicError, NotFound
from ciuic.protocol.worker_frames import USE_OF_HOLD_SECONDS
from ciuic.system.child_process import program_environment, script_command

# Longest wait of a hold for the operations in flight, by attempt. While it waits, every other change of the
# job waits too, so one slow operation (an unlink that frees gigabytes) must not stop the rest: release soon,
# and try again later.
HOLDS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0)
# Pauses between the attempts.
CUT_PAUSES_SECONDS = (0.1, 0.5, 1.0, 2.0)
# A cut without a complete flush is better than none: the snapshot is tagged "unflushed" then.
FLUSH_TIMEOUT_SECONDS = 60.0
# Longest wait of a snapshot for a checkpoint that is being saved past the overlay: most saves end within it.
PREPARE_SECONDS = 2.0
# Rounds in which names that vanished between the worker's answer and the open (renames) are asked for again.
FLUSH_ROUNDS = 5
# A worker that died is replaced within 0.1 s as a rule; a request need not fail for that.
MOUNT_PATIENCE_SECONDS = 10.0
# A script and not a module: it is started for every cut with open files, and imports nothing but what it
# needs.
_HELPER = Path(__file__).with_name("flush_helper.py")
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
    with trio.move_on_after(FLUSH_TIMEOUT_SECONDS) as scope:
        for _ in range(FLUSH_ROUNDS):
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
        log.warning("flush_timed_out", root=root, timeout_seconds=FLUSH_TIMEOUT_SECONDS)
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
        CiuicError: a root that is wanted by name is not mounted, or no root is.
    """
    for path in wanted:
        if path not in known:
            raise NotFound(f"{path} is not a protected root", hint="ciuic status names them")
    chosen = [known[path] for path in (dict.fromkeys(wanted) if wanted else known)]
    with trio.move_on_after(MOUNT_PATIENCE_SECONDS):
        for supervisor in chosen:
            await supervisor.not_in_transition()
    mounted = [supervisor for supervisor in chosen if supervisor.worker is not None]
    absent = [supervisor.path for supervisor in chosen if supervisor.worker is None]
    if absent and (wanted or not mounted):
        raise CiuicError(f"not mounted: {', '.join(absent)}", hint="ciuic status says why")
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
    for hold_seconds, pause_seconds in zip(HOLDS_SECONDS, (*CUT_PAUSES_SECONDS, None), strict=True):
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
    parts = [(path, worker.connect()) for path, worker in workers]
    try:
        for (path, worker), (_, client) in zip(workers, parts, strict=True):
            _check_session(path, worker, client)
        cuts = cut_together(parts, hold_seconds=hold_seconds)
    finally:
        for _, client in parts:
            client.close()
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


def cut_together(
    parts: Sequence[tuple[str, WorkerClient]],
    *,
    hold_seconds: float = HOLDS_SECONDS[-1],
    clock: Callable[[], float] = time.monotonic,
) -> list[RootCut]:
    """Hold all roots, cut all, release all. Blocks; run in a thread. `RootCut.session` is left empty.

    Args:
        parts: path and connection of each root; a connection is used for nothing else, because a hold belongs
            to it.
        hold_seconds: longest wait for the operations in flight.
        clock: monotonic clock.

    Raises:
        CutFailed: a root could not be held and cut, or the first may have been released before the last was
            cut. No epoch counts as sealed then.
    """
    done: list[RootCut] = []
    held: list[WorkerClient] = []
    failure: CiuicError | None = None
    failed_root = ""
    try:
        for root, client in parts:
            failed_root = root
            # Before the hold, which may fail half-way: releasing what is not held does nothing.
            held.append(client)
            client.hold(hold_seconds)
        began = clock()
        for root, client in parts:
            failed_root = root
            reply = client.cut()
            done.append(RootCut(root, "", reply.epoch, reply.cut_ns, reply.hold_us))
        # A worker ends a hold by itself after USE_OF_HOLD_SECONDS, so that a daemon that dies here stops no
        # job. The first root may have gone on by now, and the epochs would not be of one instant.
        if clock() - began > USE_OF_HOLD_SECONDS:
            failure = CiuicError("the cuts took longer than the first root was held")
    except CiuicError as error:
        failure = error
    finally:
        _release_all(held)
    if failure is None:
        return done
    # The epochs that were cut before the failure; the roots after it have none.
    for part, (_, client) in zip(done, parts, strict=False):
        _quietly(partial(client.abort, part.epoch))
    raise CutFailed(f"no snapshot could be cut: {failed_root}: {failure}", hint=failure.hint) from failure


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
