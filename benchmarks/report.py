"""Report of a session, as Markdown for people and as JSON with every raw value for programs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

import msgspec

import ciuic
from benchmarks.bars import BARS, Bar, judge, unmeasured
from benchmarks.contenders import NATIVE
from benchmarks.samples import Note, Sample, Summary, Table, ratio


class Machine(msgspec.Struct, frozen=True):
    """Properties of the machine on which the figures depend. No names: these files are published."""

    processor: str
    processors: int
    memory_bytes: int
    kernel: str
    python: str
    ciuic: str
    disk: str


class Document(msgspec.Struct, frozen=True):
    """Results of a session."""

    machine: Machine
    began: str
    ended: str
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]
    scale: float
    rounds: int
    samples: list[Sample]
    notes: list[Note]
    version: int = 1


def machine(disk: Path) -> Machine:
    """Return the properties of this machine; ``disk`` is the directory on the measured disk."""
    return Machine(
        processor=_processor(),
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=".".join(platform.release().split("-")[0].split(".")[:3]),
        python=platform.python_version(),
        ciuic=ciuic.__version__,
        disk=_file_system(disk),
    )


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(path: Path) -> str:
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == wanted:
                return kind.split()[0]
    return "unknown"


class Comparison(NamedTuple):
    """Reference of the comparison, and the bars."""

    reference: str = NATIVE
    bars: tuple[Bar, ...] = BARS
    picture: str = "Ratios to the plain directory"


WITH_THE_PLAIN_DIRECTORY = Comparison()


def markdown(
    document: Document, table: Table, plot: str = "", comparison: Comparison = WITH_THE_PLAIN_DIRECTORY
) -> str:
    """Return one table per place, with a row for each figure and contender; then what was left out."""
    lines = ["# Benchmarks", "", *_header(document), ""]
    lines += _verdict_lines(table, comparison)
    if plot:
        lines += [f"![{comparison.picture}]({plot})", ""]
    for place in dict.fromkeys(cell.place for cell in table):
        lines += [f"## On {place}", "", *_place_lines(table, place, comparison), ""]
    if document.notes:
        lines += ["## Left out", "", *(f"* {note.what}: {note.why}" for note in document.notes), ""]
    if missing := unmeasured(table, comparison.bars):
        lines += [f"Not measured in this session, though it has a bar: {', '.join(missing)}.", ""]
    return "\n".join(lines)


def _header(document: Document) -> list[str]:
    of = document.machine
    return [
        f"{of.processor}, {of.processors} processors, {of.memory_bytes / 2**30:.0f} GiB of memory, Linux {of.kernel}, "
        f"Python {of.python}, ciuic {of.ciuic}; the disk is {of.disk}.",
        f"{document.began} to {document.ended} UTC, scale {document.scale:g}, {document.rounds} rounds by turns; load "
        f"{document.load_before[0]:.1f} before and {document.load_after[0]:.1f} after (docs/benchmarks.md says how to read this).",
    ]


def _verdict_lines(table: Table, comparison: Comparison) -> list[str]:
    verdicts = [
        (cell, contender, verdict)
        for cell, row in table.items()
        for contender in row
        for verdict in judge(cell, contender, table, comparison.bars)
    ]
    lines = []
    for contender in dict.fromkeys(name for _, name, _ in verdicts):
        own = [verdict for _, name, verdict in verdicts if name == contender]
        met, missed = sum(v.met is True for v in own), sum(v.met is False for v in own)
        lines.append(f"* {contender}: {met} bars met, {missed} missed, {len(own) - met - missed} not judged")
    return [*lines, ""] if lines else []


def _place_lines(table: Table, place: str, comparison: Comparison) -> list[str]:
    lines = [
        f"| figure | unit | contender | median | quartiles | min … max | of {comparison.reference} | bar |",
        "| --- | --- | --- | ---: | --- | --- | ---: | --- |",
    ]
    for cell, row in table.items():
        if cell.place != place:
            continue
        for number, (contender, summary) in enumerate(_in_order(row, comparison.reference)):
            verdicts = "; ".join(
                f"{verdict.bar.shown(summary.unit)}: {_outcome(verdict.measured, verdict.met)}"
                for verdict in judge(cell, contender, table, comparison.bars)
            )
            name = cell.figure if number == 0 else ""
            share = ratio(row, contender, comparison.reference)
            lines.append(
                f"| {name} | {summary.unit} | {contender} | {shown(summary.median)} "
                f"| {shown(summary.low_quartile)} … {shown(summary.high_quartile)} "
                f"| {shown(summary.least)} … {shown(summary.most)} "
                f"| {'' if share is None else f'{share:.3g}'} | {verdicts} |"
            )
    return lines


def _in_order(row: dict[str, Summary], reference: str) -> list[tuple[str, Summary]]:
    """Return the contenders with the reference first, whichever had the first turn."""
    return sorted(row.items(), key=lambda item: (item[0] != reference, item[0]))


def _outcome(measured: float | None, met: bool | None) -> str:
    if measured is None:
        return "not judged"
    return f"{measured:.3g}, {'met' if met else '**missed**'}"


def shown(value: float) -> str:
    """Format a number with three significant digits and thousands separators."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
