"""The words of the harness: a *suite* is a list of *steps*, a step measures *figures* of a *contender* in a *place*.

A step is one function that is called in a process of its own for each contender and round. It gets a Job, does its
work below ``job.directory``, takes the time itself (so that setting up is not counted), and returns one value for
each of its figures: a rate wherever one makes sense, so that a ratio below one always means slower. Steps of a suite
run in their order and may use what an earlier one left; the last ones may leave files, all is removed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

Before = Literal["settled", "warm", "cold", "uncached", "remounted", "anew"]
"""What precedes a step, outside the time taken. settled: what is dirty on the place's file system and on the
contender's mount is written back. warm: and the step was carried out once for nothing, because another contender's turn
may just have dropped the machine's caches. cold: and the page cache is dropped. uncached: and so are dentries and inodes.
remounted: and the contender's mount is new. anew: and everything that the contender had was removed and furnished again."""

DRIVERS = ("kernel", "pyfuse3")
CIUIC = tuple(f"ciuic {driver}" for driver in DRIVERS)
CORE = "ciuic core"
"""The overlay core in the measuring process, with no mount and no driver."""


class Figure(NamedTuple):
    """One number with a name."""

    name: str
    unit: str
    higher_is_better: bool = True


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may know."""

    directory: str
    """Where the contender is to be measured."""
    source: str
    """A plain directory of the suite, shared by all contenders: what is read to be written below ``directory``."""
    scale: float
    """1 for figures to be reported; sizes and counts follow it."""
    control: str = ""
    """The worker's control socket, where there is a worker."""
    server_pid: int = 0
    """The process that serves the mount, 0 where there is none."""
    log: str = ""
    """The daemon's log, where there is a daemon."""
    config: str = ""
    """The configuration of that daemon and of the commands that talk to it."""
    contender: str = ""
    """Who is measured: where the work is done by a command, it says which."""
    beside: str = ""
    """A directory on the same file system as ``directory`` and not below it, for what the contender keeps."""

    def count(self, at_scale_one: int, least: int = 1) -> int:
        """A number of things at this scale."""
        return max(least, round(at_scale_one * self.scale))

    def path(self, name: str) -> str:
        """A path below the contender's directory."""
        return f"{self.directory}/{name}"


class Measured(msgspec.Struct):
    """One value for each figure of the step, None where it does not apply; ``raw`` is kept with them in the JSON."""

    values: list[float | None]
    raw: list[float] = []


class Step(NamedTuple):
    """One measurement; without figures it only prepares the next ones."""

    figures: tuple[Figure, ...]
    run: Callable[[Job], Measured]
    before: Before = "settled"
    limit_seconds: float = 300


def _nothing(job: Job) -> None:
    del job


def _always() -> str:
    return ""


class Suite(NamedTuple):
    """Steps that belong together. ``furnish_source`` runs once a place, ``furnish`` once a contender on its plain
    directory before it is mounted; ``missing`` says why the suite cannot run here, or nothing."""

    name: str
    steps: tuple[Step, ...]
    furnish_source: Callable[[Job], None] = _nothing
    furnish: Callable[[Job], None] = _nothing
    missing: Callable[[], str] = _always
    only: tuple[str, ...] = ()
    """Names of contenders; all that are files on a mount when empty."""
    places: tuple[str, ...] = ("tmpfs", "disk")
    with_daemon: bool = False
    """Snapshots are taken at intervals: ciuic is the whole daemon, not a worker alone."""
