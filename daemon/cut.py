"""The instant of a snapshot: flush what the kernel caches, then cut every root's epoch at one moment.

Guarantees: either every root's epoch was cut while changing operations were held on all of them, or none counts (those
already cut are given back to their workers). No hold outlives its timeout, whatever happens to us. Everything whose
write() had returned when ``flush`` began is in the cut, unless ``flush`` says otherwise.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
import trio

from ciuic.daemon.flush_helper import VANISHED
from ciuic.daemon.worker_process import Worker, WorkerClient
from ciuic.errors import CiuicError

HOLD_TIMEOUT_SECONDS = 5.0
FLUSH_TIMEOUT_SECONDS = 60.0
FLUSH_ROUNDS = 5
_HELPER = Path(__file__).with_name("flush_helper.py")
log = structlog.get_logger(__name__)


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
            status = await _run_helper(root, names)
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


async def _run_helper(root: str, names: Sequence[bytes]) -> int:
    """The helper's exit status. When cancelled it is killed and not waited for: it may hang as long as the mount does."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-I", "-S", str(_HELPER), root],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
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


def cut_together(
    parts: Sequence[tuple[str, WorkerClient]], *, hold_seconds: float = HOLD_TIMEOUT_SECONDS
) -> list[RootCut]:
    """Holds all, cuts all, releases all; one connection of its own for each root. Blocks: run in a thread.

    ``session`` is left empty. CutFailed when any root could not be held and cut; then no epoch counts as sealed.
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
        for root, client in parts:
            failed_root = root
            reply = client.cut()
            done.append(RootCut(root, "", reply.epoch, reply.cut_ns, reply.hold_us))
    except CiuicError as error:
        failure = error
    finally:
        for client in held:
            _quietly(client.release)
    if failure is None:
        return done
    for part, (_, client) in zip(done, parts, strict=False):
        _quietly(partial(client.abort, part.epoch))
    raise CutFailed(f"no snapshot could be cut: {failed_root}: {failure}", hint=failure.hint) from failure


def _quietly(call: Callable[[], None]) -> None:
    """What is done here also happens by itself: a hold ends with its connection, an epoch with the next start."""
    try:
        call()
    except CiuicError as error:
        log.warning("cut_cleanup_failed", error=str(error))
