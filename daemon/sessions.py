"""Connections of mounted roots, kept where they outlive the daemon: in systemd's descriptor store (sd_notify(3), FDSTORE).

While anybody has a root's connection open, its mount outlives its worker. The daemon has it open while it runs; a worker
that dies while the daemon restarts is survived only by what is stored here. Without systemd every call does nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import MutableMapping

from ciuic.daemon.notify import Notifier


class SessionStore:
    """``stored``: what systemd gave back at the start, by name; descriptors taken out of it are the caller's."""

    def __init__(self, notifier: Notifier, stored: MutableMapping[str, int]) -> None:
        self._notifier = notifier
        self._stored = stored

    def keep(self, root: str, session_fd: int, backing_fd: int) -> None:
        """Keeps duplicates of both, in place of any earlier ones of this root."""
        self.drop(root)
        self._notifier.store(_name("session", root), session_fd)
        self._notifier.store(_name("backing", root), backing_fd)

    def drop(self, root: str) -> None:
        """The root is unmounted: nothing of it is kept."""
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

    def close_rest(self) -> None:
        """Roots that are not served any more, and whatever else was stored."""
        for name in list(self._stored):
            os.close(self._stored.pop(name))


def _name(kind: str, root: str) -> str:
    return f"{kind}-{hashlib.blake2s(os.fsencode(root), digest_size=12).hexdigest()}"
