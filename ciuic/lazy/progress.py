"""Status of a lazy restore for other processes: a file in the runtime directory for each destination.

Guarantees: the file is replaced atomically, and stays after the end of the process, until the next restore into the same destination
or the next start of the machine. Readers take what they find for hostile.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from ciuic.errors import Partial
from ciuic.structs import decode_json
from ciuic.system.disk import Disk, read_regular

DEFAULT_DIRECTORY: Final = Path("/run/ciuic/restores")
_MAX_BYTES: Final = 4 << 20
_MAX_FILES: Final = 1000
_MAX_SHOWN_LOST: Final = 1000
_RATE_SECONDS: Final = 10.0

State = Literal["preparing", "filling", "closing", "complete", "interrupted"]


class LostFile(msgspec.Struct, frozen=True):
    """A path that could not be restored as it was."""

    path: str
    """Path as text; bytes that are no UTF-8 are escaped."""
    reason: str
    damaged: bool = False
    attribute: bool = False
    """Only an attribute could not be set."""


class LazyStatus(msgspec.Struct):
    """State of one lazy restore."""

    destination: str
    snapshot: str
    source: str
    pid: int
    state: State = "preparing"
    """preparing: the tree is being made. filling: mounted. closing: complete, and programs that work in it, or have files open, are still served.
    complete: a plain directory. interrupted: the process ended before."""
    began: float = 0.0
    """Seconds since the epoch."""
    updated: float = 0.0
    files_total: int = 0
    files_left: int = 0
    bytes_total: int = 0
    bytes_left: int = 0
    rate: float = 0.0
    """Bytes a second, over the last ten seconds."""
    waits: str = ""
    """Cause for which it waits, in words; while closing, who works in the mount."""
    lost: list[LostFile] = []
    """Paths that could not be restored as they were, the first thousand."""
    code: int | None = None
    """Exit code, from the end on."""

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time until everything is there; None where there is none."""
        return self.bytes_left / self.rate if self.rate > 0 else None


@dataclass
class LazyOutcome:
    """Outcome of a lazy restore."""

    destination: bytes
    complete: bool = False
    """True if the destination is a plain directory with everything that could be restored."""
    files: int = 0
    """Number of files that were fetched behind the mount."""
    bytes: int = 0
    lost: list[LostFile] = field(default_factory=list)
    left_out: int = 0
    left_out_because: str = ""

    @property
    def exact(self) -> bool:
        """True if everything is as it was at the snapshot."""
        return self.complete and not self.lost and not self.left_out_because

    @property
    def exit_code(self) -> int:
        """Exit code, as that of a plain restore."""
        return 0 if not self.lost and not self.left_out_because else Partial.exit_code


class StatusFile:
    """The file of one destination, written by the process that restores."""

    def __init__(self, directory: Path, status: LazyStatus) -> None:
        key = hashlib.sha256(os.fsencode(status.destination)).hexdigest()[:16]
        self.path: Final = directory / f"{key}.json"
        self.status = status
        self.listener: Callable[[LazyStatus], None] = lambda status: None
        """Called with each state that is written."""
        self._seen: deque[tuple[float, int]] = deque()

    def tell(self, state: State, *, code: int | None = None, lost: list[LostFile] | None = None) -> None:
        """Set the state, and write the file."""
        self.status.state, self.status.code = state, code
        if lost is not None:
            self.status.lost = lost
        self.write()

    def measure(self, bytes_left: int) -> None:
        """Note how much is left now, for the rate."""
        now = time.monotonic()
        self._seen.append((now, bytes_left))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_SECONDS:
            self._seen.popleft()
        began, before = self._seen[0]
        seconds = now - began
        self.status.bytes_left = bytes_left
        self.status.rate = max(before - bytes_left, 0) / seconds if seconds > 0 else 0.0

    def write(self) -> None:
        """Replace the file. A failure is ignored: a restore goes on without it."""
        self.status.updated = time.time()
        lost = self.status.lost
        self.status.lost = lost[:_MAX_SHOWN_LOST]
        with suppress(OSError):
            # `parents` would make the runtime directory with the umask alone, which this process sets to 0.
            for directory in (self.path.parent.parent, self.path.parent):
                directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            # 0600: it names files of directories that others may not enter.
            Disk().replace_file(self.path, msgspec.json.encode(self.status), durable=False, shared=True)
        self.status.lost = lost
        self.listener(self.status)


def decode_status(data: bytes) -> LazyStatus | None:
    """Decode a status file; None for anything else."""
    try:
        return decode_json(data, LazyStatus)
    except msgspec.DecodeError:
        return None


def read_statuses(directory: Path = DEFAULT_DIRECTORY) -> list[LazyStatus]:
    """Return the lazy restores that this machine knows of, the oldest first.

    One whose process is gone without having said how it ended counts as interrupted.
    """
    found: list[LazyStatus] = []
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))[:_MAX_FILES]
    except OSError:
        return []
    for name in names:
        with suppress(OSError):
            status = decode_status(read_regular(directory / name, _MAX_BYTES))
            if status is not None:
                if status.state not in ("complete", "interrupted") and not _is_alive(status.pid):
                    status.state = "interrupted"
                found.append(status)
    return sorted(found, key=lambda status: status.began)


def _is_alive(pid: int) -> bool:
    # A number that was given anew shows a dead restore as one that makes no progress.
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The name in parentheses may contain any bytes. A zombie waits for nothing but its parent.
    return stat.rpartition(b")")[2].split()[:1] not in ([b"Z"], [b"X"])
