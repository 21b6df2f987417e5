"""Session: every suite in every place, the contenders in alternation.

A B C A B C: each step is run by all contenders one right after the other, and the order changes with every
round, so that other activity of the machine (load, heat, a disk that fills) affects all equally. All
contenders of a suite are served at the same time; those that are not being measured do nothing.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

from benchmarks.child import FURNISH_SOURCE
from benchmarks.contenders import Contender, Place
from benchmarks.lane import FURNISH_SECONDS, Lane, Measurer, StepFailed
from benchmarks.places import directory
from benchmarks.samples import Note, Sample
from benchmarks.suite import CORE, Job, Measured, Step, Suite

T = TypeVar("T")


class Options(NamedTuple):
    """Settings of the measurement."""

    scale: float
    rounds: int
    places: tuple[str, ...]
    own: Path
    """A directory with a short name, for sockets, logs and the tmpfs to be measured."""
    disk: Path
    """A directory on the disk to be measured."""


class Session:
    """Collector of samples and notes; ``say`` gets progress messages."""

    def __init__(self, options: Options, contenders: Sequence[Contender], say: Callable[[str], None]) -> None:
        self._options = options
        self._contenders = contenders
        self._say = say
        self.samples: list[Sample] = []
        self.notes: list[Note] = []

    def note(self, what: str, why: str) -> None:
        """Remember that something was left out, once."""
        note = Note(what, why)
        if note not in self.notes:
            self.notes.append(note)
            self._say(f"    left out: {what}: {why}")

    def run(self, suites: Sequence[Suite]) -> None:
        """Measure everything that can be measured; a failure is noted and does not stop the rest."""
        for name in self._options.places:
            with directory(name, self._options.own, self._options.disk, self._options.scale) as top:
                for suite in suites:
                    if name in suite.places:
                        self._suite(suite, name, top)

    def _suite(self, suite: Suite, place: str, top: Path) -> None:
        if why := suite.missing():
            self.note(suite.name, why)
            return
        self._say(f"{time.strftime('%H:%M:%S')} {suite.name} on {place}")
        home = Path(tempfile.mkdtemp(prefix=f"{suite.name.split()[0]}-", dir=top))
        source = home / "source"
        source.mkdir()
        try:
            with ExitStack() as stack:
                if not self._furnish_source(suite, source):
                    return
                lanes = self._lanes(suite, home, source, stack)
                for number in range(self._options.rounds):
                    self._round(suite, place, lanes, number)
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _furnish_source(self, suite: Suite, source: Path) -> bool:
        measurer = Measurer(suite)
        try:
            job = Job(directory=str(source), source=str(source), scale=self._options.scale)
            measurer.ask(FURNISH_SOURCE, job, FURNISH_SECONDS)
        except StepFailed as error:
            self.note(suite.name, f"its source could not be made: {error}")
            return False
        finally:
            measurer.close()
        return True

    def _lanes(self, suite: Suite, home: Path, source: Path, stack: ExitStack) -> list[Lane]:
        starting, lanes = [], []
        for number, contender in enumerate(self._contenders):
            if not _takes_part(contender, suite):
                continue
            own = Path(tempfile.mkdtemp(dir=self._options.own))
            stack.callback(shutil.rmtree, own, ignore_errors=True)
            backing = home / f"c{number}"
            place = Place(backing, own, self._options.scale)
            backing.mkdir()
            place.beside.mkdir()
            starting.append(Lane(contender, suite, place, source))
        stack.callback(_at_once, Lane.close, starting)
        # A suite whose first step is "anew" is furnished by that step.
        anew = suite.steps[0].before == "anew"
        errors = [None] * len(starting) if anew else _at_once(_furnish, starting)
        for lane, error in zip(starting, errors, strict=True):
            if error is None:
                lanes.append(lane)
            else:
                self.note(f"{suite.name}, {lane.contender.name}", first_and_last_line(error))
        return lanes

    def _round(self, suite: Suite, place: str, lanes: list[Lane], number: int) -> None:
        for index, step in enumerate(suite.steps):
            turn = number % max(1, len(lanes))
            for lane in [*lanes[turn:], *lanes[:turn]]:
                try:
                    measured = lane.measure(index)
                except Exception as error:  # only this lane ends
                    what = step.figures[0].name if step.figures else f"preparing step {index}"
                    self.note(
                        f"{suite.name} on {place}, {lane.contender.name}: {what}", first_and_last_line(error)
                    )
                    lane.close()
                    lanes.remove(lane)
                    continue
                self._keep(suite, place, lane.contender.name, number, step, measured)

    def _keep(
        self, suite: Suite, place: str, contender: str, number: int, step: Step, measured: Measured
    ) -> None:
        # Kept with the first figure only: the other figures are computed from the same values.
        raw = measured.raw
        for figure, value in zip(step.figures, measured.values, strict=True):
            if value is not None:
                self.samples.append(Sample(suite.name, *figure, place, contender, number, value, raw))
                self._say(f"{number + 1:3} {figure.name:44} {contender:28} {value:12,.4g} {figure.unit}")
                raw = []


def _furnish(lane: Lane) -> Exception | None:
    try:
        lane.furnish()
    except Exception as error:  # any failure of a server ends its lane only
        return error
    return None


def _at_once(work: Callable[[Lane], T], lanes: Sequence[Lane]) -> list[T]:
    """Run unmeasured work in parallel: starting and stopping three servers then takes as long as one."""
    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        return list(pool.map(work, lanes))


def _takes_part(contender: Contender, suite: Suite) -> bool:
    if suite.with_daemon and contender.serve_with_daemon is None:
        return False
    return contender.name in suite.only if suite.only else contender.name != CORE


def first_and_last_line(error: Exception) -> str:
    """Return the first line of an error message and, if there are more, the last."""
    lines = [line.strip()[:400] for line in str(error).splitlines() if line.strip()]
    return " … ".join(lines if len(lines) < 2 else (lines[0], lines[-1])) or type(error).__name__
