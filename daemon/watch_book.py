"""Who is watched and what has happened to them, for the next daemon: `watched.json` in the runtime directory.

Like all that lies there it need not survive the kernel. Guarantees: it is replaced as a whole; what cannot be read is nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from ciuic.control_types import Incident
from ciuic.watch_client import Kind

FILE_NAME: Final = "watched.json"
MOST_INCIDENTS: Final = 50
log = structlog.get_logger(__name__)


class WatchRecord(msgspec.Struct, kw_only=True):
    """A trainer, without what only descriptors can tell."""

    uid: int
    pid: int
    start_ticks: int
    name: str
    where: str
    kind: Kind
    heartbeat_seconds: float
    since_ns: int


class WatchBook(msgspec.Struct, kw_only=True):
    """``incidents``: newest first."""

    trainers: list[WatchRecord] = []
    incidents: list[Incident] = []


def read_book(runtime_dir: Path) -> WatchBook:
    """What a predecessor knew; empty when there is nothing or it cannot be read."""
    try:
        return msgspec.json.decode((runtime_dir / FILE_NAME).read_bytes(), type=WatchBook)
    except FileNotFoundError:
        return WatchBook()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("watched_not_read", error=str(error))
        return WatchBook()


def write_book(runtime_dir: Path, book: WatchBook) -> None:
    """Failing costs the next daemon's knowledge, nothing else."""
    temporary = runtime_dir / f"{FILE_NAME}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(book))
        temporary.rename(runtime_dir / FILE_NAME)
    except OSError as error:
        log.warning("watched_not_written", error=str(error))


def remove_book(runtime_dir: Path) -> None:
    """The daemon has stopped and nobody follows it."""
    with suppress(OSError):
        (runtime_dir / FILE_NAME).unlink(missing_ok=True)
