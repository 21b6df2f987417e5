"""Where a scrub that is done in slices has stopped: `verify --checksum --max-duration`.

One *pass* reads every pack, lowest number first, then looks whether every snapshot has all its chunks. Numbers grow and are not used
again, so packs that come meanwhile are read at the end of the pass, and packs that go are missed by nobody.

Guarantees: one scrub at a time (a lock on the file); a file that was torn, that another version wrote or that belongs to
another repository begins a new pass, for a pass too many does no harm. It lies beside the repository's own files as
`scrub` and is no part of the repository.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from ciuic.errors import Busy, CiuicError, NotPermitted

NAME: Final = "scrub"
_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20


class Pass(msgspec.Struct):
    """How far the pass is. Packs up to ``last_pack`` are read, the snapshots in ``checked`` have all their chunks looked up."""

    version: int = _VERSION
    repository: str = ""
    began_ns: int = 0
    """0: none has begun, or the last one is complete."""
    last_pack: int = -1
    bytes_read: int = 0
    checked: list[str] = []
    damages: int = 0
    """Found in this pass, earlier slices included."""
    completed_ns: int = 0
    """When the last pass that got through was complete; 0: there was none."""


class ScrubBook:
    """The file, locked. Context manager. ``state`` may be changed and is on disk after ``save``."""

    def __init__(self, repository: Path, repository_id: str) -> None:
        """Busy while another scrub is at work; NotPermitted or CiuicError where it cannot be kept."""
        self.path = repository / NAME
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except PermissionError as error:
            raise NotPermitted(
                f"{self.path} may not be written: a scrub in slices notes there where it stopped",
                hint="run it as root, or without --max-duration",
            ) from error
        except OSError as error:
            raise CiuicError(
                f"{self.path} cannot be written: {error.strerror}", hint="run it without --max-duration"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise Busy(f"another scrub of {repository} is at work", hint="let it end, or end it") from error
        self.state = self._read(repository_id)

    def begin(self, now_ns: int) -> None:
        """A new pass."""
        self.state = Pass(
            repository=self.state.repository, began_ns=now_ns, completed_ns=self.state.completed_ns
        )

    def complete(self, now_ns: int) -> None:
        """The pass got through."""
        self.state.completed_ns, self.state.began_ns = now_ns, 0

    def save(self) -> None:
        """What stands there may be torn after a crash, and is not believed then."""
        data = msgspec.json.encode(self.state)
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def _read(self, repository_id: str) -> Pass:
        nothing = Pass(repository=repository_id)
        try:
            state = msgspec.json.decode(os.pread(self._fd, _MOST_BYTES, 0), type=Pass)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return nothing
        return state if (state.version, state.repository) == (_VERSION, repository_id) else nothing

    def __enter__(self) -> ScrubBook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
