"""Journal of watched trainers and their incidents for the next daemon.

`watched.json` in the runtime directory.

Like every file there it need not survive the kernel. Guarantees: it is replaced atomically; an unreadable
journal counts as empty.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from ciuic.protocol.control_types import Incident
from ciuic.protocol.watch_client import Kind

FILE_NAME: Final = "watched.json"
# Incidents that are kept over restarts, for the status document and for the hourly limits.
MAX_INCIDENTS: Final = 50
log = structlog.get_logger(__name__)


class WatchRecord(msgspec.Struct, kw_only=True):
    """Record of a trainer, without what only descriptors can tell."""

    uid: int
    pid: int
    start_ticks: int
    name: str
    where: str
    kind: Kind
    heartbeat_seconds: float
    since_ns: int


class WatchJournal(msgspec.Struct, kw_only=True):
    """Content of the file."""

    trainers: list[WatchRecord] = []
    incidents: list[Incident] = []
    """Incidents, newest first."""


def read_journal(runtime_dir: Path) -> WatchJournal:
    """Return the predecessor's journal; empty when there is none or it cannot be read."""
    try:
        return msgspec.json.decode((runtime_dir / FILE_NAME).read_bytes(), type=WatchJournal)
    except FileNotFoundError:
        return WatchJournal()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("watched_not_read", error=str(error))
        return WatchJournal()


def write_journal(runtime_dir: Path, journal: WatchJournal) -> None:
    """Replace the journal. A failure is logged; it costs the next daemon's knowledge and nothing else."""
    temporary = runtime_dir / f"{FILE_NAME}.tmp"
    try:
        # Left by a daemon that was killed; O_EXCL would refuse it.
        temporary.unlink(missing_ok=True)
        # 0600: names and reasons of all users are in it, and the directory is open to everybody.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(journal))
        temporary.rename(runtime_dir / FILE_NAME)
    except OSError as error:
        log.warning("watched_not_written", error=str(error))


def remove_journal(runtime_dir: Path) -> None:
    """Remove the journal: the daemon has stopped and no other one follows."""
    with suppress(OSError):
        (runtime_dir / FILE_NAME).unlink(missing_ok=True)
