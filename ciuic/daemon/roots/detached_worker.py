"""Give up a worker whose overlay another process unmounted while the worker lives.

Guarantees: a worker that serves open files goes on serving them, with nothing pending in the undo log that it
shares with its successor. Leaves noticing to mount_watch.py, mounting anew to supervisor.py.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import trio

from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerClient
from ciuic.errors import CiuicError

# The old worker should leave undo log, journal and socket before the root is mounted anew. That takes some
# milliseconds, unless the host is overloaded or the worker hangs, and meanwhile the plain directory is open
# to everybody.
_DETACH_SECONDS: Final = 3.0
# libfuse owns the connection of a pyfuse3 worker, so the end of the process is the only sign that no file was
# open in it.
_END_SECONDS: Final = 0.5


def abort_pending(client: WorkerClient) -> None:
    """Abort every epoch that is sealed and not captured."""
    for epoch in client.status().pending:
        client.abort(epoch)


async def leave_to_linger(worker: OverlayWorker, grace_seconds: float) -> bool:
    """Have a worker whose overlay is gone end when the last file in it is closed.

    Return whether it lives on until then.

    Args:
        worker: worker without a mount.
        grace_seconds: longest time for which it serves open files.
    """
    if worker.session_fd is None:
        with trio.move_on_after(_END_SECONDS):
            await worker.wait()
    lingers = worker.is_alive() and not worker.session_is_over()
    with trio.move_on_after(_DETACH_SECONDS):
        if not lingers:
            await worker.wait()
            return False
        with suppress(CiuicError):
            await worker.ask(abort_pending)
            await worker.ask(lambda client: client.stop(grace_seconds))
    return lingers
