"""State of a scrub that runs in slices (`verify --checksum --max-duration`): where the last slice stopped.

One *pass* reads every pack, lowest number first, then checks that every snapshot has all its chunks. Numbers grow and are never
used again, so packs that are added meanwhile are read at the end of the pass, and removed packs are not missed.

Guarantees: one scrub at a time (a lock on the file). A file that is torn, that another version wrote or that belongs to another
repository begins a new pass, because an extra pass does no harm. The file is called `scrub`, lies beside the repository's own
files and is no part of the repository.
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
_MAX_BYTES: Final = 64 << 20


class Pass(msgspec.Struct):
    """Progress of a pass: packs up to ``last_pack`` are read, and all chunks of the snapshots in ``checked`` were looked up."""

    version: int = _VERSION
    repository: str = ""
    began_ns: int = 0
    """Wall-clock time of its begin; 0: none has begun, or the last one is complete."""
    last_pack: int = -1
    bytes_read: int = 0
    checked: list[str] = []
    damages: int = 0
    """Number of damages found in this pass, earlier slices included."""
    completed_ns: int = 0
    """Wall-clock time at which the last complete pass ended; 0: there was none."""


class ScrubBook:
    """The locked state file, as a context manager. The caller changes ``state`` and writes it with `save`.

    Raises:
        Busy: another scrub is running.
        NotPermitted: the file may not be written.
        CiuicError: the file cannot be written.
    """

    def __init__(self, repository: Path, repository_id: str) -> None:
        self.path = repository / NAME
        try:
            # O_NOFOLLOW: root writes here, and the repository may belong to a user.
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except PermissionError as error:
            raise NotPermitted(
                f"{self.path} is not writable: a scrub in slices stores its progress there",
                hint="run it as root, or without --max-duration",
            ) from error
        except OSError as error:
            raise CiuicError(
                f"{self.path} cannot be written: {error.strerror}", hint="run it without --max-duration"
            ) from error
        try:
            # Not the repository's lock: writers go on while a scrub reads.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise Busy(
                f"another scrub of {repository} is running", hint="wait for it to end, or stop it"
            ) from error
        self.state = self._read(repository_id)

    def begin(self, now_ns: int) -> None:
        """Begin a new pass."""
        self.state = Pass(
            repository=self.state.repository, began_ns=now_ns, completed_ns=self.state.completed_ns
        )

    def complete(self, now_ns: int) -> None:
        """Mark the pass as complete."""
        self.state.completed_ns, self.state.began_ns = now_ns, 0

    def save(self) -> None:
        """Write the state. Without a sync: a file that is torn after a crash is not believed, and a new pass begins."""
        data = msgspec.json.encode(self.state)
        # In place, not by a rename: the lock is on this very file.
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def _read(self, repository_id: str) -> Pass:
        nothing = Pass(repository=repository_id)
        try:
            state = msgspec.json.decode(os.pread(self._fd, _MAX_BYTES, 0), type=Pass)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return nothing
        return state if (state.version, state.repository) == (_VERSION, repository_id) else nothing

    def __enter__(self) -> ScrubBook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
