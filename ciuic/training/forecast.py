"""What saving will come to, tried before it matters: at the first boundary, when the size of the state is known.

How fast the repository takes data the writer has measured at its start, by some megabytes in a file without a name; the first real
snapshot tells it better. What will not fit, or not in time, is said then and not on the day on which it does not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.repository import Repository
from ciuic.training.memory import memory_left
from ciuic.training.policies import AfterIf, Interval, Rule
from ciuic.training.preservation import Keep, Latest
from ciuic.units import human_size, plural

_TRIED_BYTES: Final = 8 << 20
_NO_NAME_MODE: Final = 0o600


class Forecast(NamedTuple):
    size_bytes: int
    """Of the state, uncompressed: what a snapshot takes of which nothing was stored before."""
    write_seconds: float | None
    """About how long one takes until it is durable, and the last one before preemption with it. None: not known."""
    free_bytes: int
    """On the file system of the repository."""
    warnings: tuple[str, ...]


def forecast(
    size_bytes: int,
    *,
    free_bytes: int,
    write_seconds: float | None,
    at_most: int | None = None,
    stored: int = 0,
    shortest_interval_seconds: float | None = None,
    grace_seconds: float | None = None,
    memory_bytes: int | None = None,
) -> Forecast:
    """``at_most``: snapshots that the rules keep, if they keep a number; ``stored``: of them there already. ``memory_bytes``: what is left."""
    said = []
    size, free = human_size(size_bytes), human_size(free_bytes)
    to_come = (
        1 if at_most is None else max(1, at_most + 1 - stored)
    )  # the oldest goes after the newest is there
    if size_bytes > free_bytes:
        said.append(f"a snapshot of {size} does not fit: {free} are free")
    elif to_come * size_bytes > free_bytes:
        said.append(
            f"{plural(to_come, 'snapshot')} of {size} each may not fit, if all of it changes from one to the next: {free} are free"
        )
    if write_seconds is not None:
        takes = f"a snapshot of {size} takes about {write_seconds:.0f} s to be durable"
        if grace_seconds is not None and write_seconds > grace_seconds:
            said.append(
                f"{takes}, and {grace_seconds:.0f} s are left after a signal: there will be no last snapshot"
            )
        if shortest_interval_seconds is not None and write_seconds > shortest_interval_seconds:
            said.append(
                f"{takes}, and one is due every {shortest_interval_seconds:.0f} s: some will be skipped"
            )
    if memory_bytes is not None and size_bytes > memory_bytes:
        said.append(f"the copy of {size} does not fit into memory: {human_size(memory_bytes)} are left")
    return Forecast(size_bytes, write_seconds, free_bytes, tuple(said))


def look_ahead(
    save_dir: Path,
    root: bytes,
    size_bytes: int,
    *,
    write_seconds: float | None,
    rules: Iterable[Rule],
    keeps: Iterable[Keep],
    grace_seconds: float | None,
) -> Forecast:
    """For snapshots of ``root`` in that repository as it is. CiuicError; OSError."""
    space = os.statvfs(save_dir)
    with Repository.open(save_dir) as repository:
        stored = len(repository.snapshots.list(root=root))
    return forecast(
        size_bytes,
        free_bytes=space.f_bavail * space.f_frsize,
        write_seconds=write_seconds,
        at_most=max((rule.number for rule in keeps if isinstance(rule, Latest)), default=None),
        stored=stored,
        shortest_interval_seconds=min(
            (float(rule.seconds) for rule in rules if isinstance(rule, (Interval, AfterIf))),
            default=None,
        ),
        grace_seconds=grace_seconds,
        memory_bytes=memory_left(),
    )


def measure(directory: str) -> float:
    """Bytes per second that are durable there; 0 where that cannot be tried. Leaves nothing behind, killed at any instant."""
    content = memoryview(os.urandom(_TRIED_BYTES))
    with suppress(OSError, AttributeError):
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, _NO_NAME_MODE)
        try:
            began = time.monotonic()
            while content:
                content = content[os.write(fd, content) :]
            os.fsync(fd)
            return _TRIED_BYTES / max(1e-6, time.monotonic() - began)
        finally:
            os.close(fd)
    return 0.0
