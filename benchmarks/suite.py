"""Terms of the harness.

A *suite* is a list of *steps*; a step measures *figures* of a *contender* in a *place*.

A step is one function that is called in a process of its own for each contender and round. It gets a Job,
does its work below ``job.directory``, measures the time itself (so that preparation is not counted), and
returns one value for each of its figures: a rate wherever one makes sense, so that a ratio below one always
means slower. Steps of a suite run in order and may use what an earlier one left; remaining files are removed
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

Before = Literal["settled", "warm", "cold", "uncached", "remounted", "anew"]
"""Preparation of a step, outside the measured time.

* settled: dirty pages of the place's file system and of the contender's mount are written back.
* warm: settled, and the step runs once unmeasured, because the turn of another contender may have dropped the
  machine's caches.
* cold: settled, and the page cache is dropped.
* uncached: cold, and dentries and inodes are dropped.
* remounted: uncached, and the contender's mount is new.
* anew: uncached, and the contender's files are removed and furnished again.
"""

DRIVERS = ("kernel", "pyfuse3")
CIUIC = tuple(f"ciuic {driver}" for driver in DRIVERS)
CORE = "ciuic core"
"""The overlay core in the measuring process, with no mount and no driver."""


class Figure(NamedTuple):
    """Named number."""

    name: str
    unit: str
    higher_is_better: bool = True


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Context of a step."""

    directory: str
    """Directory in which the contender is measured."""
    source: str
    """Plain directory of the suite, shared by all contenders: the source of copies to ``directory``."""
    scale: float
    """Factor of sizes and counts; 1 for figures to be reported."""
    control: str = ""
    """The worker's control socket, where there is a worker."""
    server_pid: int = 0
    """The process that serves the mount, 0 where there is none."""
    log: str = ""
    """The daemon's log, where there is a daemon."""
    config: str = ""
    """The configuration of that daemon and of the commands that talk to it."""
    contender: str = ""
    """Name of the contender, which selects the command if a command does the work."""
    beside: str = ""
    """A directory on the same file system as ``directory`` and not below it, for what the contender keeps."""

    def count(self, at_scale_one: int, least: int = 1) -> int:
        """Scale a number of things."""
        return max(least, round(at_scale_one * self.scale))

    def path(self, name: str) -> str:
        """Return a path below the contender's directory."""
        return f"{self.directory}/{name}"


class Measured(msgspec.Struct):
    """Values of a step, one per figure (None where it does not apply); the JSON has ``raw`` with them."""

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
    """Steps that run in order on the same files.

    ``furnish_source`` runs once per place, ``furnish`` once per contender on its plain directory before it is
    mounted; ``missing`` returns why the suite cannot run on this machine, or an empty string.
    """

    name: str
    steps: tuple[Step, ...]
    furnish_source: Callable[[Job], None] = _nothing
    furnish: Callable[[Job], None] = _nothing
    missing: Callable[[], str] = _always
    only: tuple[str, ...] = ()
    """Names of contenders; empty: all that serve a mount."""
    places: tuple[str, ...] = ("tmpfs", "disk")
    with_daemon: bool = False
    """True if snapshots are taken at intervals: ciuic is then the whole daemon, not a worker alone."""
