"""What lies over a root when the daemon comes to it, and making it ready for a worker.

Four cases: nothing of ours (mount); a live worker of a predecessor (adopt it); dead mounts of killed workers, perhaps
several on top of one another (detach them); an overlay that somebody else serves (refuse, touching nothing).
Guarantees: a mount that anything may still answer is never detached. Leaves starting and supervising to supervisor.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from ciuic.daemon.worker_process import Worker, adopt_worker
from ciuic.errors import Busy, CiuicError, NotFound, UsageError
from ciuic.fuse_layer import mounts
from ciuic.fuse_layer.control_client import peer_pid

PROBE_TIMEOUT_SECONDS = 5.0
MAX_STACKED = 64
log = structlog.get_logger(__name__)


def recover_root(root: str, worker_socket: Path) -> Worker | None:
    """Adopts the live worker of ``root``, or leaves the plain directory there and returns None. Blocks; run in a thread.

    Busy when another process serves an overlay there, or one that hangs.
    """
    if mounts.overlay_at(root) is not None:
        worker = adopt_worker(worker_socket)
        if worker is not None:
            log.info("worker_adopted", root=root, pid=worker.pid, session=worker.session)
            return worker
    detach_dead(root)
    # The socket of a worker that still serves open handles of a mount already detached: it is reached no more.
    worker_socket.unlink(missing_ok=True)
    return None


def is_orphaned(root: str, worker_socket: Path) -> bool:
    """Whether an overlay lies over ``root`` that no worker serves any more."""
    return mounts.overlay_at(root) is not None and peer_pid(worker_socket) is None


def detach_dead(root: str) -> int:
    """Takes every dead overlay off ``root`` and returns how many there were. Busy for one that is not dead."""
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
        mounts.detach(root)
        log.warning("dead_mount_detached", root=root, mount_id=entry.mount_id)
    raise CiuicError(f"{root} has more than {MAX_STACKED} dead overlays on it", hint=f"umount -l {root}")


def open_root(root: str) -> int:
    """The backing descriptor of ``root``. NotFound and UsageError say what is wrong with the path."""
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
    """Whether an overlay of ours, dead or alive, lies over ``root``."""
    return mounts.overlay_at(root) is not None
