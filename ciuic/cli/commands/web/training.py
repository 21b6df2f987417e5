"""Numbers of trainings beside the snapshots: what the files of ``[[watch_number]]`` and the states of `SnapshotManager` say, and the chart of it.

Guarantees: of a file at most `_MAX_FILE_BYTES` are read, of a snapshot the end of it; at most `MAX_MARKS` snapshots are looked at. What is read
is hostile: `training_numbers` runs in a process with limits (`look_process`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import quote_from_bytes

from ciuic.cli.commands.web.charts import Axis, Point, axis_of, in_order, lines, thinned
from ciuic.cli.commands.web.jobs import Mark, NumberSeries, TrainingNumbers
from ciuic.cli.commands.web.reading import Reading
from ciuic.cli.shared.contents import as_recorded
from ciuic.cli.shared.times import NS, local
from ciuic.errors import CiuicError, NotFound
from ciuic.history import step_of
from ciuic.number_files import (
    all_numbers,
    is_event_file,
    is_pattern,
    json_lines,
    newest_match,
    open_numbers,
)
from ciuic.printable import one_line
from ciuic.repository import Repository, SnapshotInfo
from ciuic.repository.lookup import find, join
from ciuic.types import Snapshot, SnapshotId, is_safety
from ciuic.verdicts.records import DatedCheckpoint
from ciuic.verdicts.sources import SnapshotFile

_COMPANIONS: Final = ("grad_norm", "train/grad_norm")
"""Keys that are looked for in each watched file besides its own."""
_MAX_FILE_BYTES: Final = 64 << 20
_END_BYTES: Final = 64 << 10
"""Of a log in a snapshot, the end that tells the step."""
MAX_MARKS: Final = 200
"""Snapshots beside the numbers and on the time line."""
_MAX_SERIES: Final = 12
WIDTH: Final = 1000
_LEFT, _RIGHT = 70.0, 930.0
_TOP, _BOTTOM = 20.0, 260.0
_TIME_LINE: Final = (40.0, 960.0)
_TIME_STEPS: Final = tuple(
    60 * minutes for minutes in (1, 5, 15, 60, 180, 360, 720, 1440, 2880, 10080, 43200, 129600, 525600)
)
_MAX_TIME_TICKS: Final = 8


def training_numbers(reading: Reading) -> TrainingNumbers:
    """Return the numbers and the snapshots that belong beside them."""
    infos = [info for info in reading.infos if not is_safety(info.tags, info.message)][:MAX_MARKS]
    summaries = reading.summaries(infos)
    watched = list(dict.fromkeys((one.file, one.key) for one in _watched(reading)))
    series = [one for file, key in watched for one in _of_file(reading, file, key)]
    reported: dict[tuple[str, str], list[Point]] = {}
    marks = []
    for info in infos:
        repository = reading.session.repository_of(info.id)
        snapshot = repository.snapshots.load(info.id)
        step = _of_state(repository, info.id, snapshot, reported)
        if step is None:
            step = next(
                (at for file, _ in watched if (at := _step_in(repository, snapshot, file)) is not None), None
            )
        newest = summaries.get(str(info.id))
        path = b"" if newest is None else newest.checkpoint.path
        marks.append(
            Mark(
                snapshot=str(info.id),
                time_ns=info.time_ns,
                step=step_of(path) if step is None and path else step,
                state="" if newest is None else newest.checkpoint.verdict.state,
                checkpoint=quote_from_bytes(path),
            )
        )
    series += [
        NumberSeries(name=name, source=source, points=tuple(thinned(in_order(points[::-1]))))
        for (source, name), points in reported.items()
    ]
    return TrainingNumbers(series=tuple(series[:_MAX_SERIES]), marks=tuple(marks))


def _watched(reading: Reading) -> Sequence[Any]:
    try:
        return reading.session.config.watch_numbers
    except CiuicError:
        # A remote is read where no configuration is.
        return ()


def _of_file(reading: Reading, file: str, key: str) -> Iterator[NumberSeries]:
    """Yield the series of a file: of the file of today, else of the newest snapshot that has it."""
    for number, name in enumerate((key, *(one for one in _COMPANIONS if one != key))):
        problem = ""
        try:
            source, found = file, _live(reading, file, name)
        except OSError as error:
            problem = error.strerror or "it cannot be read"
            try:
                source, found = _stored(reading, file, name)
            except CiuicError:
                source, found = file, []
        if found or not number:
            points = tuple(thinned(in_order([(step, _finite(value)) for step, value in found])))
            yield NumberSeries(
                name=one_line(name), source=one_line(source), points=points, problem="" if found else problem
            )


def _live(reading: Reading, file: str, key: str) -> list[tuple[int, float]]:
    if reading.session.remote_url is not None:
        raise OSError(0, "its host is another one")
    with open_numbers(file) as (path, fd, facts):
        return all_numbers(
            lambda at, length: os.pread(fd, length, at),
            facts.st_size,
            key,
            is_events=is_event_file(path),
            most_bytes=_MAX_FILE_BYTES,
        )


def _stored(reading: Reading, file: str, key: str) -> tuple[str, list[tuple[int, float]]]:
    repository, snapshot = reading.snapshot("")
    found = _file_in(repository, snapshot, file)
    if found is None:
        raise NotFound(f"{snapshot.id} has no {one_line(os.fsencode(file))}")
    path, source = found
    numbers = all_numbers(
        lambda at, length: bytes(source.read(at, length)),
        source.size_bytes,
        key,
        is_events=is_event_file(path),
        most_bytes=_MAX_FILE_BYTES,
    )
    return f"{path} in {snapshot.id}", numbers


def _file_in(repository: Repository, snapshot: Snapshot, file: str) -> tuple[str, SnapshotFile] | None:
    """Return path and content of a file in a snapshot; of a pattern, of the one that was changed last."""
    path = as_recorded(snapshot, os.fsencode(file))
    folder, name = os.path.split(path)
    try:
        if is_pattern(os.fsdecode(name)):
            entries = repository.trees.entries(find(repository, snapshot, folder).entry.content)
            newest = newest_match(
                ((os.fsdecode(entry.name), entry) for entry in entries),
                os.fsdecode(name),
                lambda entry: entry.mtime_ns,
            )
            if newest is None:
                return None
            path = join(folder, newest.name)
        located = find(repository, snapshot, path)
    except CiuicError:
        return None
    if not located.entry.is_file:
        return None
    return os.fsdecode(path), SnapshotFile(repository, snapshot, located, lambda time_ns: None)


def _step_in(repository: Repository, snapshot: Snapshot, file: str) -> int | None:
    """Return the last step that a log of JSON lines has in a snapshot; None if it tells none."""
    found = _file_in(repository, snapshot, file)
    if found is None or is_event_file(found[0]):
        return None
    source = found[1]
    begin = max(0, source.size_bytes - _END_BYTES)
    with suppress(CiuicError):
        # The value does not matter, but the line must be whole, and have a step.
        numbers = json_lines(bytes(source.read(begin, source.size_bytes - begin)), "step").numbers
        if numbers:
            return numbers[-1][0]
    return None


def _of_state(
    repository: Repository, id_: SnapshotId, snapshot: Snapshot, reported: dict[tuple[str, str], list[Point]]
) -> int | None:
    """Add what `manager.report` has stored in a training state; return its step, None for other snapshots."""
    # Imported here: the front has no use for it.
    from ciuic.training.format.reading import read_facts
    from ciuic.training.stored_tensors import holds_state

    try:
        if not holds_state(repository, snapshot):
            return None
        facts = read_facts(repository, id_)
    except (CiuicError, ValueError):
        return None
    if facts.step is not None:
        for name, value in facts.metrics.items():
            key = (f"reported, {one_line(snapshot.roots[0].path)}", one_line(name))
            reported.setdefault(key, []).append((facts.step, _finite(float(value))))
    return facts.step


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- the chart


class Curve(NamedTuple):
    """A series as it is drawn."""

    series: NumberSeries
    lines: list[str]
    dots: list[tuple[float, float]]
    """Of a series of few points, each."""
    is_right: bool
    """Its axis is the one on the right."""


class Flag(NamedTuple):
    """A snapshot on the axis of steps."""

    mark: Mark
    at: float
    before: Mark | None
    """The snapshot before, if it has a checkpoint as well or neither has."""


class TimeLine(NamedTuple):
    """Snapshots on an axis of time."""

    flags: list[tuple[float, SnapshotInfo, str]]
    """(coordinate, snapshot, verdict on its newest checkpoint or empty), oldest first."""
    ticks: list[tuple[float, str]]
    """(coordinate, local time)."""


class Chart(NamedTuple):
    """Curves over the steps, and the snapshots below them."""

    curves: list[Curve]
    flags: list[Flag]
    steps: list[tuple[float, float]]
    """(coordinate, step) of each tick."""
    left: list[tuple[float, float]]
    right: list[tuple[float, float]]


def chart_of(numbers: TrainingNumbers, chosen: Sequence[str]) -> Chart:
    """Return the chart of the first series of each axis, or of the chosen ones (by number): losses left, all others right."""
    wanted = [one for at, one in enumerate(numbers.series) if str(at) in chosen and one.points]
    if not wanted:
        filled = [one for one in numbers.series if one.points]
        norms = [one for one in filled if "norm" in one.name]
        others = [one for one in filled if "norm" not in one.name]
        wanted = [*sorted(others, key=lambda one: "loss" not in one.name)[:1], *norms[:1]]
    first = [one for one in wanted if "loss" in one.name] or wanted[:1]
    second = [one for one in wanted if one not in first]
    known = [mark.step for mark in numbers.marks if mark.step is not None]
    x = axis_of([*known, *(step for one in wanted for step, _ in one.points)], _LEFT, _RIGHT)
    axes = [
        axis_of([value for one in some for _, value in one.points if value is not None], _BOTTOM, _TOP)
        for some in (first, second)
    ]
    curves = [
        _curve(one, x, y, is_right=bool(at))
        for at, (some, y) in enumerate(zip((first, second), axes, strict=True))
        for one in some
    ]
    flags = [
        Flag(
            mark,
            x.at(mark.step),
            before if before and bool(before.checkpoint) == bool(mark.checkpoint) else None,
        )
        for mark, before in with_before(numbers.marks)
        if mark.step is not None
    ]
    # As a reader goes through it: from left to right.
    flags.reverse()
    return Chart(
        curves,
        flags,
        [(x.at(tick), tick) for tick in x.ticks(10)],
        _ticks(axes[0]) if first else [],
        _ticks(axes[1]) if second else [],
    )


def timeline_of(infos: Sequence[SnapshotInfo], verdicts: Mapping[str, DatedCheckpoint]) -> TimeLine:
    """Return the time line of snapshots, which come newest first."""
    times = [info.time_ns / NS for info in infos]
    if times and max(times) - min(times) < _TIME_STEPS[0]:
        times = [times[0] - _TIME_STEPS[2], times[0] + _TIME_STEPS[2]]
    axis = axis_of(times, *_TIME_LINE)
    # Local midnights and round hours: offsets of zones are whole quarters of an hour.
    offset = local(int(axis.low) * NS).utcoffset() or timedelta()
    shift = offset.total_seconds()
    step = next((step for step in _TIME_STEPS if (axis.high - axis.low) / step <= _MAX_TIME_TICKS), math.inf)
    first = math.ceil((axis.low + shift) / step) if math.isfinite(step) else 1
    last = math.floor((axis.high + shift) / step) if math.isfinite(step) else 0
    form = "%Y-%m-%d" if step >= 86400 else "%m-%d %H:%M" if axis.high - axis.low > 43200 else "%H:%M"
    ticks = [at * step - shift for at in range(first, last + 1)] or [axis.low, axis.high]
    return TimeLine(
        [
            (
                axis.at(info.time_ns / NS),
                info,
                "" if (newest := verdicts.get(str(info.id))) is None else newest.checkpoint.verdict.state,
            )
            for info in reversed(infos)
        ],
        [(axis.at(tick), local(int(tick) * NS).strftime(form)) for tick in ticks],
    )


def with_before(marks: Sequence[Mark]) -> list[tuple[Mark, Mark | None]]:
    """Return each mark with that of the snapshot before it."""
    return list(zip(marks, [*marks[1:], None], strict=False))


def _curve(series: NumberSeries, x: Axis, y: Axis, *, is_right: bool) -> Curve:
    dots = [(x.at(step), y.at(value)) for step, value in series.points if value is not None]
    return Curve(series, list(lines(series.points, x, y)), dots if len(dots) <= 60 else [], is_right)


def _ticks(axis: Axis) -> list[tuple[float, float]]:
    return [(axis.at(tick), tick) for tick in axis.ticks()]


def value_at(series: NumberSeries, step: int | None) -> float | None:
    """Return the last number at or before a step; None if there is none."""
    if step is None:
        return None
    return next((value for at, value in reversed(series.points) if at <= step), None)
