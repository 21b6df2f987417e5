"""The instant of a snapshot: flush what the kernel caches, let writers that pass the overlay by finish, then cut every
root's epoch at one moment.

Guarantees: either every root's epoch was cut while changing operations were held on all of them, or none counts (those
already cut are given back to their workers). No hold outlives its timeout, whatever happens to us. Everything whose
write() had returned when ``flush`` began is in the cut, unless ``flush`` says otherwise.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
import trio

from ciuic.child_process import program_environment, script_command
from ciuic.daemon.flush_helper import VANISHED
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.daemon.worker_process import Worker, WorkerClient
from ciuic.errors import CiuicError, NotFound
from ciuic.fuse_layer.control_frames import USE_OF_HOLD_SECONDS

HOLDS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0)
"""For how long a hold waits for the operations in flight, try by try. While it waits, every other change of the job waits too, so
one slow operation (an unlink that frees gigabytes) must not stop the rest: let go soon, and try again later."""
CUT_PAUSES_SECONDS = (0.1, 0.5, 1.0, 2.0)
"""Between the tries."""
FLUSH_TIMEOUT_SECONDS = 60.0
PREPARE_SECONDS = 2.0
"""For how long a snapshot waits for a checkpoint that is being saved past the overlay: most saves end within it."""
FLUSH_ROUNDS = 5
MOUNT_PATIENCE_SECONDS = 10.0
_HELPER = Path(__file__).with_name("flush_helper.py")
log = structlog.get_logger(__name__)


Flush = Callable[[str, Worker], Awaitable[bool]]


class RootCut(NamedTuple):
    """One root's part of a cut."""

    path: str
    session: str
    epoch: int
    cut_ns: int
    hold_us: int


class CutFailed(CiuicError):
    """No cut was made: a worker did not answer, or its operations in flight did not end in time."""


async def flush(root: str, worker: Worker) -> bool:
    """Writes back the kernel's cache of one mount. False, logged, when that could not be finished in time."""
    status: int | None = None
    with trio.move_on_after(FLUSH_TIMEOUT_SECONDS) as scope:
        for _ in range(FLUSH_ROUNDS):
            names = await worker.ask(lambda client: client.writers())
            # What no handle can write was flushed by its last close: with none there is nothing to start a process for.
            status = await _run_helper(root, names) if names else 0
            if status != VANISHED:
                break
        # Still renaming after so many rounds: files that live for milliseconds, each closed, and so flushed, soon after.
    if scope.cancelled_caught:
        log.warning("flush_timed_out", root=root, timeout_seconds=FLUSH_TIMEOUT_SECONDS)
        return False
    if status not in (0, VANISHED):
        log.warning("flush_failed", root=root, exit_status=status)
        return False
    return True


async def prepare(root: str, worker: Worker) -> None:
    """Lets writers that the overlay does not see finish, for a moment. A worker that cannot is cut as it is."""

    def work() -> None:
        client = worker.connect()  # the standing connection is for everything that goes on meanwhile
        try:
            client.prepare(PREPARE_SECONDS)
        finally:
            client.close()

    try:
        await trio.to_thread.run_sync(work, abandon_on_cancel=True)
    except CiuicError as error:
        log.warning("prepare_failed", root=root, error=str(error))


async def _run_helper(root: str, names: Sequence[bytes]) -> int:
    """The helper's exit status. When cancelled it is killed and not waited for: it may hang as long as the mount does."""
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
        process.kill()
        raise


async def mounted_roots(
    known: Mapping[str, RootSupervisor], wanted: Sequence[str]
) -> tuple[list[RootSupervisor], list[str]]:
    """The mounted roots that are asked for (none named: all), and those of "all" that are not mounted.

    NotFound for a root that is not known; CiuicError for one that is asked for by name and not mounted.
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
    """Flushes all roots, and prepares them, at once; True when every one was flushed."""
    results: list[bool] = []

    async def one(supervisor: RootSupervisor, worker: Worker) -> None:
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


async def cut_all(supervisors: Sequence[RootSupervisor]) -> list[RootCut]:
    """Cuts all roots at one instant, on connections of their own. CutFailed, CiuicError when that is not possible."""
    workers = [(supervisor.path, supervisor.worker) for supervisor in supervisors]
    if any(worker is None for _, worker in workers):
        raise CiuicError("an overlay worker ended during the snapshot", hint="try again")
    sessions = {path: worker.session for path, worker in workers if worker is not None}

    def work(hold_seconds: float) -> list[RootCut]:
        parts = [(path, worker.connect()) for path, worker in workers if worker is not None]
        try:
            return cut_together(parts, hold_seconds=hold_seconds)
        finally:
            for _, client in parts:
                client.close()

    for hold_seconds, pause_seconds in zip(HOLDS_SECONDS, (*CUT_PAUSES_SECONDS, None), strict=True):
        try:
            # Not abandoned on cancellation: an epoch that is cut must become known.
            cuts = await trio.to_thread.run_sync(work, hold_seconds)
        except CutFailed as error:
            if pause_seconds is None:
                raise
            log.warning("cut_tried_again", error=str(error))
            await trio.sleep(pause_seconds)
        else:
            return [cut._replace(session=sessions[cut.path]) for cut in cuts]
    raise AssertionError("the last round returns or raises")


def cut_together(
    parts: Sequence[tuple[str, WorkerClient]],
    *,
    hold_seconds: float = HOLDS_SECONDS[-1],
    clock: Callable[[], float] = time.monotonic,
) -> list[RootCut]:
    """Hold all, cut all, release all; one connection of its own for each root. Blocks: run in a thread.

    ``session`` is left empty. CutFailed when any root could not be held and cut, or when the first may have been let go before
    the last was cut; then no epoch counts as sealed.
    """
    done: list[RootCut] = []
    held: list[WorkerClient] = []
    failure: CiuicError | None = None
    failed_root = ""
    try:
        for root, client in parts:
            failed_root = root
            held.append(client)  # also when hold fails half-way: releasing what is not held does nothing
            client.hold(hold_seconds)
        began = clock()
        for root, client in parts:
            failed_root = root
            reply = client.cut()
            done.append(RootCut(root, "", reply.epoch, reply.cut_ns, reply.hold_us))
        if clock() - began > USE_OF_HOLD_SECONDS:
            failure = CiuicError("the cuts took longer than the first root was held")
    except CiuicError as error:
        failure = error
    finally:
        _release_all(held)
    if failure is None:
        return done
    for part, (_, client) in zip(done, parts, strict=False):
        _quietly(partial(client.abort, part.epoch))
    raise CutFailed(f"no snapshot could be cut: {failed_root}: {failure}", hint=failure.hint) from failure


def _release_all(clients: Sequence[WorkerClient]) -> None:
    """Release all at once: a worker answers when it has written what changed, and no other root is to stay held until then."""
    threads = [threading.Thread(target=_quietly, args=(client.release,)) for client in clients[1:]]
    for thread in threads:
        thread.start()
    for client in clients[:1]:
        _quietly(client.release)
    for thread in threads:
        thread.join()


def _quietly(call: Callable[[], None]) -> None:
    """What is done here also happens by itself: a hold ends with its connection, an epoch with the next start."""
    try:
        call()
    except CiuicError as error:
        log.warning("cut_cleanup_failed", error=str(error))
