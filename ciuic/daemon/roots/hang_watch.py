"""Detect a worker that hangs and kill it, so that a successor goes on with its session.

The probe needs no lock and no disk in the worker. A worker that does not answer three probes in a row is
stopped, deadlocked or in an endless loop, and its job waits with it; a disk that hangs keeps a worker from
serving, not from answering. Guarantees: a worker whose session would end with it is never killed.
"""

from __future__ import annotations

import structlog
import trio

from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerClient
from ciuic.errors import CiuicError

PERIOD_SECONDS = 3.0
# The probe needs no lock and no disk in the worker.
ANSWER_SECONDS = 5.0
# Probes in a row without an answer, after which a worker counts as hung.
SILENCES = 3
log = structlog.get_logger(__name__)

# A limiter of its own: probes of workers that hang are abandoned and keep their threads until the socket
# times out.
_threads = trio.CapacityLimiter(256)


async def end_when_hung(worker: OverlayWorker) -> None:
    """Probe a worker until it hangs, and kill it then. Cancel this when the worker ends by itself."""
    if worker.session_fd is None:
        return
    silences = 0
    while silences < SILENCES:
        await trio.sleep(PERIOD_SECONDS)
        silences = 0 if await _answers(worker) else silences + 1
    log.error("worker_hangs", pid=worker.pid, silences=silences)
    worker.kill()


async def _answers(worker: OverlayWorker) -> bool:
    """Probe once, on a new connection: the standing one may be waiting for an answer that needs a disk."""
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
