"""The part of a root's status document that its worker knows."""

from __future__ import annotations

from typing import Final

import trio

from ciuic.daemon.roots.worker_process import OverlayWorker
from ciuic.errors import Unreachable
from ciuic.protocol.control_types import RootStatus, rfc3339

STATUS_TIMEOUT_SECONDS: Final = 2.0
_COPIED_FIELDS: Final = (
    *("driver", "driver_why", "passthrough", "filtered", "epoch", "dirty_bytes"),
    *("dirty_inodes", "undo_bytes", "open_files", "requests"),
)


async def add_worker_status(document: RootStatus, worker: OverlayWorker, *, has_gap: bool) -> None:
    """Add what the worker answers within `STATUS_TIMEOUT_SECONDS` to `document`.

    A worker that does not answer is its error.

    Args:
        document: document to complete.
        worker: worker of the root.
        has_gap: a process has written to the root without passing the overlay, so tracking does not count.
    """
    document.worker_pid = worker.pid
    document.session = worker.session
    # Short, because `ciuic status` waits for the slowest worker; the document shows one that does not answer.
    try:
        with trio.fail_after(STATUS_TIMEOUT_SECONDS):
            facts = await worker.ask(lambda client: client.status())
    except (Unreachable, trio.TooSlowError):
        document.error = "the worker does not answer"
        return
    for name in _COPIED_FIELDS:
        setattr(document, name, getattr(facts, name))
    document.waited_seconds = facts.waited_us / 1e6
    document.pending = list(facts.pending)
    document.tracking = facts.since > 0 and not has_gap
    document.mounted_since = rfc3339(facts.mounted_ns) if facts.mounted_ns else ""
