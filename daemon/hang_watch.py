"""Noticing a worker that hangs, and ending it, so that a successor goes on with its session.

A worker is asked for a sign of life that needs no lock and no disk. One that does not answer three times in a row is stopped,
deadlocked or out of its mind, and its job waits with it; a disk that hangs keeps a worker from serving, not from answering.
Guarantees: a worker whose session would die with it is never ended.
"""

from __future__ import annotations

import structlog
import trio

from ciuic.daemon.worker_process import Worker, WorkerClient
from ciuic.errors import CiuicError

PERIOD_SECONDS = 3.0
ANSWER_SECONDS = 5.0
SILENCES = 3
log = structlog.get_logger(__name__)

_threads = trio.CapacityLimiter(256)


async def end_when_hung(worker: Worker) -> None:
    """Returns when ``worker`` was ended; cancelled when it ended by itself."""
    if worker.session_fd is None:
        return
    silences = 0
    while silences < SILENCES:
        await trio.sleep(PERIOD_SECONDS)
        silences = 0 if await _answers(worker) else silences + 1
    log.error("worker_hangs", pid=worker.pid, silences=silences)
    worker.kill()


async def _answers(worker: Worker) -> bool:
    """On a connection of its own: the standing one may be waiting for an answer that needs a disk."""
    client = worker.connect()
    try:
        with trio.fail_after(ANSWER_SECONDS):
            await trio.to_thread.run_sync(_ask, client, abandon_on_cancel=True, limiter=_threads)
    except trio.TooSlowError:
        return False
    except CiuicError as error:
        log.warning("worker_silent", pid=worker.pid, error=str(error))
        return False
    return True


def _ask(client: WorkerClient) -> None:
    try:
        client.alive()
    finally:
        client.close()
