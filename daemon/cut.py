"""The instant of a snapshot: flush what the kernel caches, then cut every root's epoch at one moment.

Guarantees: either every root's epoch was cut while changing operations were held on all of them, or none counts (those
already cut are given back to their workers). No hold outlives its timeout, whatever happens to us. Everything whose
write() had returned when ``flush`` began is in the cut, unless ``flush`` says otherwise.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
import trio

from ciuic.daemon.worker_process import Worker, WorkerClient
from ciuic.errors import CiuicError

HOLD_TIMEOUT_SECONDS = 5.0
FLUSH_TIMEOUT_SECONDS = 60.0
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
    """Writes back the kernel's cache of one mount. False, logged, when that did not end in time."""
    names = await worker.ask(lambda client: client.writers())
    process = await trio.lowlevel.open_process(
        [sys.executable, "-I", "-S", str(_HELPER), root], stdin=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    assert process.stdin is not None
    with trio.move_on_after(FLUSH_TIMEOUT_SECONDS):
        try:
            async with process.stdin:
                await process.stdin.send_all(b"\0".join(names))
        except trio.BrokenResourceError:
            pass  # it ended early; its exit status says how
        status = await process.wait()
        if status == 0:
            return True
        log.warning("flush_failed", root=root, exit_status=status)
        return False
    log.warning("flush_timed_out", root=root, timeout_seconds=FLUSH_TIMEOUT_SECONDS, open_files=len(names))
    process.kill()  # takes effect when the mount answers again; nobody waits for that
    return False


def cut_together(parts: Sequence[tuple[str, WorkerClient]], *, hold_seconds: float = HOLD_TIMEOUT_SECONDS) -> list[RootCut]:
    """Holds all, cuts all, releases all; one connection of its own for each root. Blocks: run in a thread.

    ``session`` is left empty. CutFailed when any root could not be held and cut; then no epoch counts as sealed.
    """
    done: list[RootCut] = []
    held: list[WorkerClient] = []
    failure: CiuicError | None = None
    failed_root = ""
    try:
        for failed_root, client in parts:
            held.append(client)  # also when hold fails half-way: releasing what is not held does nothing
            client.hold(hold_seconds)
        for failed_root, client in parts:
            reply = client.cut()
            done.append(RootCut(failed_root, "", reply.epoch, reply.cut_ns, reply.hold_us))
    except CiuicError as error:
        failure = error
    finally:
        for client in held:
            _quietly(client.release)
    if failure is None:
        return done
    for part, (_, client) in zip(done, parts, strict=False):
        _quietly(lambda client=client, part=part: client.abort(part.epoch))  # type: ignore[misc]
    raise CutFailed(f"no snapshot could be cut: {failed_root}: {failure}", hint=failure.hint) from failure


def _quietly(call: object) -> None:
    """What is done here also happens by itself: a hold ends with its connection, an epoch with the next start."""
    try:
        call()  # type: ignore[operator]
    except CiuicError as error:
        log.warning("cut_cleanup_failed", error=str(error))
