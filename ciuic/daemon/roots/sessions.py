"""Sessions of mounted roots, kept where they outlive the daemon.

In systemd's descriptor store, or in a keeper process.

A session is the root's connection with the kernel. While any process has it open, the mount outlives its
worker. The daemon has it open while it runs. Besides, systemd's descriptor store has it (sd_notify(3),
FDSTORE), and where systemd does not start the daemon, a keeper (session_keeper.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, MutableMapping
from typing import Final

from ciuic.daemon.base.notify import Notifier
from ciuic.daemon.roots.session_keeper import SessionKeeper
from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerOptions

# Process id of systemd, whose descriptor store keeps what the daemon sends to NOTIFY_SOCKET.
_SERVICE_MANAGER: Final = 1


class SessionStore:
    """Holders of sessions outside the daemon. Belongs to the trio thread."""

    def __init__(
        self, notifier: Notifier, stored: MutableMapping[str, int], keeper: SessionKeeper | None = None
    ) -> None:
        """Prepare to keep sessions.

        Args:
            notifier: connection to systemd.
            stored: descriptors that systemd gave back at the start, by name.
            keeper: client of the keeper process; None where systemd starts the daemon.
        """
        self._notifier = notifier
        self._stored = stored
        self._keeper = keeper

    @property
    def holders(self) -> set[int]:
        """Processes that have sessions and backing directories open by design, so that they are no bypasses."""
        pid = self._keeper.pid if self._keeper is not None else None
        found = {_SERVICE_MANAGER} if self._notifier.active else set()
        return found | {pid} if pid is not None else found

    async def inherit(self, roots: Iterable[str], *, prepare: bool) -> None:
        """Take over the sessions that keepers of daemons before this one hold.

        Args:
            roots: paths of the configured roots.
            prepare: start this daemon's keeper as well.
        """
        if self._keeper is None:
            return
        # First, so that the new keeper imports what it needs while the others are asked.
        if prepare:
            await self._keeper.prepare()
        for root, (session_fd, backing_fd) in (await self._keeper.inherit(roots)).items():
            for name, fd in ((_name("session", root), session_fd), (_name("backing", root), backing_fd)):
                if self._stored.setdefault(name, fd) != fd:
                    os.close(fd)  # a duplicate of what systemd has kept as well

    async def keep(self, options: WorkerOptions, worker: OverlayWorker) -> None:
        """Keep the session of ``worker``, in place of any earlier one of its root; nothing where it has none."""
        if worker.session_fd is None:
            return
        # First: systemd keeps several descriptors of one name, and would give the earlier session back as
        # well.
        self._unstore(options.root)
        self._notifier.store(_name("session", options.root), worker.session_fd)
        self._notifier.store(_name("backing", options.root), worker.backing_fd)
        if self._keeper is not None:
            await self._keeper.keep(options, worker)

    # Every holder must be told: a mount whose session is held and that no worker serves is not dead but
    # hangs.
    async def drop(self, root: str) -> None:
        """Release the session of a root that is unmounted or whose session is given up."""
        self._unstore(root)
        if self._keeper is not None:
            await self._keeper.drop(root)

    def _unstore(self, root: str) -> None:
        for kind in ("session", "backing"):
            self._notifier.unstore(_name(kind, root))

    def take(self, root: str) -> tuple[int, int] | None:
        """Return the session and backing descriptor that a predecessor kept for the root.

        The caller owns them. Return None where one is missing.
        """
        session_fd = self._stored.pop(_name("session", root), None)
        backing_fd = self._stored.pop(_name("backing", root), None)
        # A successor needs both.
        if session_fd is not None and backing_fd is not None:
            return session_fd, backing_fd
        for fd in (session_fd, backing_fd):
            if fd is not None:
                os.close(fd)
        return None

    async def close_rest(self) -> None:
        """Close stored descriptors that no root has taken, and end the keepers of earlier daemons."""
        for name in list(self._stored):
            os.close(self._stored.pop(name))
        if self._keeper is not None:
            await self._keeper.end_predecessors()

    async def run(self) -> None:
        """Replace a keeper that ends, until cancelled. Return at once where there is no keeper."""
        if self._keeper is not None:
            await self._keeper.run()


def _name(kind: str, root: str) -> str:
    # A hash: a name in the descriptor store has 255 characters at most, and no colon (sd_notify(3)).
    return f"{kind}-{hashlib.blake2s(os.fsencode(root), digest_size=12).hexdigest()}"
