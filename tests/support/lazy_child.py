"""Process that restores lazily, for tests: from a remote in a directory whose store can be slow, held or down.

    python -m support.lazy_child REMOTE CACHE SNAPSHOT PATH DEST CONTROL

Files in CONTROL decide at each read of a data pack: ``held``: it waits; ``down``: it fails; ``delay``: it takes as many seconds;
``allowed``: as many reads are carried out, and others wait.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from ciuic.errors import CiuicError
from ciuic.lazy.service import LazyRestore
from ciuic.remote import pack
from ciuic.remote.access import open_remote
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.objects.model import RemoteUnreachable
from ciuic.remote.reading.opening import read_remote

_POLL_SECONDS = 0.005


class ControlledObjects:
    """Store whose reads of data packs obey the files of a directory."""

    def __init__(self, inner: DirectoryObjects, control: Path) -> None:
        self._inner = inner
        self._control = control

        self._reads = 0

    def _allowed(self) -> float:
        try:
            return float((self._control / "allowed").read_text() or 0)
        except FileNotFoundError:
            return float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _is_table(self, name: str, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether the table of the pack is read, which a mount needs: it lies at the end."""
        info = self._inner.info(name)
        return info is not None and sum(ranges[-1]) >= info.size_bytes - pack.TRAILER_BYTES

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Any:
        """Read ranges, as the control files say."""
        if name.startswith("packs/data") and not self._is_table(name, ranges):
            self._reads += 1
            mine = self._reads
            while (self._control / "held").exists() or mine > self._allowed():
                time.sleep(_POLL_SECONDS)
            if (self._control / "down").exists():
                raise RemoteUnreachable("the store is unplugged")
            delay = self._control / "delay"
            if delay.exists():
                time.sleep(float(delay.read_text()))
        return self._inner.get_ranges(name, ranges)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Restore, and print what happens."""
    remote_dir, cache, snapshot, path, dest, control = sys.argv[1:]
    # Which chunks lie next to the table, and would come with it unasked, is chance.
    vars(pack)["TAIL_GUESS_BYTES"] = pack.TRAILER_BYTES
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    began = time.monotonic()
    objects: Any = ControlledObjects(DirectoryObjects(remote_dir), Path(control))
    with read_remote(
        open_remote(objects, []), cache_root=Path(cache), retry_seconds=1, close_objects=True
    ) as opened:
        found = opened.snapshots.load(opened.snapshots.resolve(snapshot))
        restore = LazyRestore(
            opened.repository_of([found.id]),
            found,
            os.fsencode(path),
            os.fsencode(dest),
            special=True,
            status_directory=Path(control) / "status",
        )

        def ready(_: object) -> None:
            say(f"ready {time.monotonic() - began:.3f}")

        try:
            outcome = restore.run(ready)
        except CiuicError as error:
            say(f"error {error.exit_code} {error.message}")
            return error.exit_code
    say(f"done {time.monotonic() - began:.3f}")
    for lost in outcome.lost:
        say(f"lost {lost.path}")
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
