"""Connections of mounted roots, kept where they outlive the daemon: in systemd's descriptor store, or by a process of ours.

While anybody has a root's connection open, its mount outlives its worker. The daemon has it open while it runs. Beside it
systemd's descriptor store has it (sd_notify(3), FDSTORE), and where systemd does not start the daemon, a keeper
(session_keeper.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, MutableMapping
from typing import Final

from ciuic.daemon.notify import Notifier
from ciuic.daemon.session_keeper import SessionKeeper
from ciuic.daemon.worker_process import Worker, WorkerOptions

_SERVICE_MANAGER: Final = 1
"""Process whose descriptor store keeps what the daemon sends to NOTIFY_SOCKET."""


class SessionStore:
    """``stored``: what systemd gave back at the start, by name; descriptors taken out of it are the caller's."""

    def __init__(
        self, notifier: Notifier, stored: MutableMapping[str, int], keeper: SessionKeeper | None = None
    ) -> None:
        self._notifier = notifier
        self._stored = stored
        self._keeper = keeper

    @property
    def holders(self) -> set[int]:
        """Processes that have sessions and backing directories of ours open by design: none of them goes round an overlay."""
        pid = self._keeper.pid if self._keeper is not None else None
        found = {_SERVICE_MANAGER} if self._notifier.active else set()
        return found | {pid} if pid is not None else found

    async def inherit(self, roots: Iterable[str], *, prepare: bool) -> None:
        """Ask keepers of daemons before this one for what they hold. ``prepare``: start the keeper of this one."""
        if self._keeper is None:
            return
        if prepare:  # it imports what it needs while the others are asked
            await self._keeper.prepare()
        for root, (session_fd, backing_fd) in (await self._keeper.inherit(roots)).items():
            for name, fd in ((_name("session", root), session_fd), (_name("backing", root), backing_fd)):
                if self._stored.setdefault(name, fd) != fd:
                    os.close(fd)  # systemd has kept it as well

    async def keep(self, options: WorkerOptions, worker: Worker) -> None:
        """Keep the session of ``worker``, in place of any earlier one of its root; nothing where it has none."""
        if worker.session_fd is None:
            return
        self._unstore(options.root)
        self._notifier.store(_name("session", options.root), worker.session_fd)
        self._notifier.store(_name("backing", options.root), worker.backing_fd)
        if self._keeper is not None:
            await self._keeper.keep(options, worker)

    async def drop(self, root: str) -> None:
        """The root is unmounted, or its session given up: nothing of it is kept."""
        self._unstore(root)
        if self._keeper is not None:
            await self._keeper.drop(root)

    def _unstore(self, root: str) -> None:
        for kind in ("session", "backing"):
            self._notifier.unstore(_name(kind, root))

    def take(self, root: str) -> tuple[int, int] | None:
        """Session and backing descriptor that a predecessor kept for the root; None without either."""
        session_fd = self._stored.pop(_name("session", root), None)
        backing_fd = self._stored.pop(_name("backing", root), None)
        if session_fd is not None and backing_fd is not None:
            return session_fd, backing_fd
        for fd in (session_fd, backing_fd):
            if fd is not None:
                os.close(fd)
        return None

    async def close_rest(self) -> None:
        """Let go of roots that are not served any more, and of whatever else was stored."""
        for name in list(self._stored):
            os.close(self._stored.pop(name))
        if self._keeper is not None:
            await self._keeper.end_predecessors()

    async def run(self) -> None:
        """Replace a keeper that ends. For ever, or not at all where there is none."""
        if self._keeper is not None:
            await self._keeper.run()


def _name(kind: str, root: str) -> str:
    return f"{kind}-{hashlib.blake2s(os.fsencode(root), digest_size=12).hexdigest()}"
