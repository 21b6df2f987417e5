"""What the daemon needs to know of the configuration, as one frozen value.

Guarantees: nothing below service.py reads the configuration's own model, so its shape may change without the daemon's
parts noticing. Leaves validation to ciuic.config: what arrives here has been checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_BLOCK_BYTES = 256 * 1024
DEFAULT_UNDO_LIMIT_BYTES = 64 * 1024**3


class RootSettings(NamedTuple):
    """One directory to protect."""

    path: str
    driver: str = "pyfuse3"
    excludes: tuple[str, ...] = ()
    """Effective patterns (ciuic.excludes), global ones included."""


class Settings(NamedTuple):
    """Everything the daemon acts on."""

    socket: Path
    repository: Path
    group: str = ""
    roots: tuple[RootSettings, ...] = ()
    interval_seconds: int = 3600
    io_priority: str = "idle"
    retention: Any = None
    """The configuration's retention rules, as ciuic.retention takes them; only passed on."""
    undo_limit_bytes: int = DEFAULT_UNDO_LIMIT_BYTES
    config_path: str = ""

    @property
    def runtime_dir(self) -> Path:
        """Where the sockets, the lock and the journal are: beside the control socket."""
        return self.socket.parent

    def root(self, path: str) -> RootSettings | None:
        """The settings of the root at ``path``."""
        return next((root for root in self.roots if root.path == path), None)
