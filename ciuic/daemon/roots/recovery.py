"""Recovery of a root that the daemon begins to serve.

Four cases: no overlay (mount one); a live worker of a predecessor (adopt it); dead mounts of killed workers,
perhaps several on top of one another (detach them); an overlay that another process serves (refuse, and touch
nothing). Guarantees: a mount that any process may still answer is never detached. Leaves starting and
supervising to supervisor.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from ciuic.daemon.roots.worker_process import OverlayWorker, adopt_worker
from ciuic.errors import Busy, CiuicError, NotFound, UsageError
from ciuic.fuse_layer.system import mounts
from ciuic.protocol.worker_client import peer_pid

# A dead mount answers ENOTCONN at once; one that does not answer in time hangs, and must not be detached.
PROBE_TIMEOUT_SECONDS = 5.0
# A bound for the loop over mounts that lie on top of one another.
MAX_STACKED = 64
log = structlog.get_logger(__name__)


def recover_root(root: str, worker_socket: Path) -> OverlayWorker | None:
    """Adopt the live worker of `root`, or detach dead overlays and return None. Blocks; run in a thread.

    Raises:
        Busy: another process serves an overlay there, or one hangs there.
    """
    # Without a mount, a worker that listens there serves files that were open when the root was unmounted.
    if mounts.overlay_at(root) is not None:
        worker = adopt_worker(worker_socket)
        if worker is not None:
            log.info("worker_adopted", root=root, pid=worker.pid, session=worker.session)
            return worker
    detach_dead(root)
    # A worker that still serves open handles of a detached mount may listen there; it need not be reached any
    # more.
    worker_socket.unlink(missing_ok=True)
    return None


def is_orphaned(root: str, worker_socket: Path) -> bool:
    """Return whether an overlay is over `root` that no worker serves."""
    return mounts.overlay_at(root) is not None and peer_pid(worker_socket) is None


def detach_dead(root: str) -> int:
    """Detach every dead overlay over `root`, and return their number.

    Raises:
        Busy: an overlay there is not dead.
        CiuicError: there are more than `MAX_STACKED`.
    """
    for count in range(MAX_STACKED):
        entry = mounts.overlay_at(root)
        if entry is None:
            return count
        liveness = mounts.probe(root, PROBE_TIMEOUT_SECONDS)
        if liveness != "dead":
            raise Busy(
                f"{root} is served by another ciuic"
                + (" that does not answer" if liveness == "hung" else ""),
                hint="stop the daemon that serves it; if there is none: umount -l " + root,
            )
        lost = mounts.detach_keeping_inside(root)
        log.warning("dead_mount_detached", root=root, mount_id=entry.mount_id)
        if lost:
            log.error("mounts_inside_lost", root=root, mounts=lost)
    raise CiuicError(f"{root} has more than {MAX_STACKED} dead overlays on it", hint=f"umount -l {root}")


def open_root(root: str) -> int:
    """Return the backing descriptor of `root`.

    Raises:
        NotFound: there is nothing at the path.
        UsageError: the path is not a directory.
        CiuicError: the directory cannot be opened.
    """
    try:
        return mounts.open_backing(root)
    except FileNotFoundError as error:
        raise NotFound(
            f"{root} does not exist", hint="make it, or take it out of the configuration"
        ) from error
    except NotADirectoryError as error:
        raise UsageError(
            f"{root} is not a directory", hint="protect the directory that contains it"
        ) from error
    except OSError as error:
        raise CiuicError(f"{root} cannot be opened: {os.strerror(error.errno or 0)}") from error


def is_mounted(root: str) -> bool:
    """Return whether an overlay of ciuic, dead or alive, is over `root`."""
    return mounts.overlay_at(root) is not None
