"""Forecast of what saving will cost, made at the first boundary, when the size of the state is known.

The writer has measured at its start how fast the repository takes data, by some megabytes in a file without a
name; the first real snapshot tells it better. What will not fit, or not in time, is reported then and not on
the day on which it fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.repository import Repository
from ciuic.training.free_resources import memory_left
from ciuic.training.policy.retention_rules import Keep, Latest
from ciuic.training.policy.save_rules import AfterIf, Interval, Rule
from ciuic.units import human_size, plural

_TRIED_BYTES: Final = 8 << 20
_UNNAMED_FILE_MODE: Final = 0o600


class Forecast(NamedTuple):
    """Expected cost of a snapshot."""

    size_bytes: int
    """Size of the uncompressed state: what a snapshot takes of which nothing was stored before."""
    write_seconds: float | None
    """Estimated time until a snapshot is durable, also the last one before preemption. None: unknown."""
    free_bytes: int
    """Free space on the file system of the repository."""
    warnings: tuple[str, ...]
    """One sentence for each thing that will not fit, or not in time."""


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
    """Compute a forecast.

    Args:
        size_bytes: Size of the state.
        free_bytes: Free space on the file system of the repository.
        write_seconds: Time until a snapshot is durable; None: unknown.
        at_most: Number of snapshots that the rules keep; None: all.
        stored: Number of them that exist already.
        shortest_interval_seconds: Shortest time between two snapshots that a rule asks for.
        grace_seconds: Time between a signal and the end of the process.
        memory_bytes: Memory that is left for the copy of the state.
    """
    said = []
    size, free = human_size(size_bytes), human_size(free_bytes)
    # One more than are kept: the oldest is removed only after the newest is durable.
    to_come = 1 if at_most is None else max(1, at_most + 1 - stored)
    if size_bytes > free_bytes:
        said.append(f"a snapshot of {size} does not fit: {free} are free")
    elif to_come * size_bytes > free_bytes:
        said.append(
            f"{plural(to_come, 'snapshot')} of {size} each may not fit if all of the state changes between them: "
            f"{free} are free"
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


def forecast_for(
    save_dir: Path,
    root: bytes,
    size_bytes: int,
    *,
    write_seconds: float | None,
    rules: Iterable[Rule],
    keeps: Iterable[Keep],
    grace_seconds: float | None,
) -> Forecast:
    """Compute the forecast for snapshots of ``root`` in the repository as it is now.

    Raises:
        CiuicError: The repository cannot be opened.
        OSError: The same, as the file system says it.
    """
    # `f_bavail`, not `f_bfree`: blocks that are reserved for root are not ours.
    space = os.statvfs(save_dir)
    with Repository.open(save_dir) as repository:
        stored = len(repository.snapshots.list(root=root))
    return forecast(
        size_bytes,
        free_bytes=space.f_bavail * space.f_frsize,
        write_seconds=write_seconds,
        # The largest of several: rules only add to what is kept.
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
    """Return how many bytes per second become durable in a directory; 0 if that cannot be tried.

    Nothing is left behind, even if the process is killed: the file has no name.
    """
    # Random: a file system that compresses would take zeros in no time.
    content = memoryview(os.urandom(_TRIED_BYTES))
    # Not every file system has O_TMPFILE, and not every Python knows it.
    with suppress(OSError, AttributeError):
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, _UNNAMED_FILE_MODE)
        try:
            began = time.monotonic()
            while content:
                content = content[os.write(fd, content) :]
            # What counts is durable data, not what the page cache takes.
            os.fsync(fd)
            return _TRIED_BYTES / max(1e-6, time.monotonic() - began)
        finally:
            os.close(fd)
    return 0.0
