"""Name of this host's log and the number of its next entry, kept in a local file.

Guarantee: after `save` returned, a bucket whose log is shorter is noticed, also after a power cut.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from ciuic.remote.format.names import HexId, Number
from ciuic.repository import log
from ciuic.repository.disk.opening import open_regular
from ciuic.repository.disk.operations import Disk

_MAX_BYTES: Final = 4096


class WriterPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Log of this host, up to the entry before ``next``."""

    writer: HexId
    next: Number


class WriterState:
    """File with the `WriterPosition`; ``path`` is in a directory of the caller's own."""

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self._path = path
        self._disk = disk or Disk()

    def load(self) -> WriterPosition | None:
        """Return what was saved; None if there is nothing, or nothing readable."""
        try:
            fd = open_regular(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        try:
            return msgspec.json.decode(data, type=WriterPosition)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # Without the file the host takes a new name, which is always allowed.
            log.warning("remote_writer_state_unreadable", path=self._path, error=str(error))
            return None

    def save(self, position: WriterPosition) -> None:
        """Replace what was saved; durable on return."""
        self._disk.replace_file(self._path, msgspec.json.encode(position))
