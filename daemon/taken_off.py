"""An overlay that is taken off its root while its worker lives: what becomes of the worker, and what is said of it.

Guarantees: a worker that serves open files goes on serving them, with nothing pending in the undo log that it shares with its
successor. Leaves noticing to mount_watch.py, mounting anew to supervisor.py.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import trio

from ciuic.daemon.alerts import Alerts
from ciuic.daemon.worker_process import Worker, WorkerClient
from ciuic.errors import CiuicError

_DETACH_SECONDS: Final = 3.0
"""For which mounting anew waits for the old worker, which should leave undo log, journal and socket first: some milliseconds, unless
the host is overloaded or the worker hangs. The root is open to everybody meanwhile."""
_END_SECONDS: Final = 0.5
"""Time for which mounting anew waits for the end of a pyfuse3 worker, the only sign that nothing was open: libfuse owns its connection."""


def abort_pending(client: WorkerClient) -> None:
    """Give up every epoch that is sealed and not captured."""
    for epoch in client.status().pending:
        client.abort(epoch)


async def leave_to_linger(worker: Worker, grace_seconds: float) -> bool:
    """Let a worker whose overlay is gone end when nothing is open in it any more, and return whether it goes on until then."""
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


def report_taken_off(alerts: Alerts, path: str, *, lingers: bool) -> None:
    """Say what happened, and the truth about open files."""
    files = (
        "files that were open in it go on being served, and what is written to them is not tracked"
        if lingers
        else "no file was open in it"
    )
    alerts.report(
        f"unmounted:{path}",
        f"the overlay of {path} was taken off by somebody else (umount, or a signal to its worker) and is mounted again; {files}",
        hint="the next snapshot compares the whole tree; to take an overlay away: ciuic unprotect PATH",
        root=path,
        severity="warning",
    )
