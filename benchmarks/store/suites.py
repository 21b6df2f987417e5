"""The suites of `make bench-store`. Each begins with everything anew: a round is a whole story, from an empty store on.

A capture and a restore are over when what was written is on the disk: the time of syncfs(2) after the command counts, because
some tools wait for the disk themselves and others leave it to the kernel. Where nothing has changed there is nothing to wait
for, and only the command counts. Captures and restores that a suite calls cold find no page of any file in memory, but their own program.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.places import DISK, EXT4, XFS
from benchmarks.store import tools, tree
from benchmarks.store.usage import Used
from benchmarks.suite import Before, Figure, Job, Measured, Step, Suite
from benchmarks.timing import preparation
from benchmarks.workloads.training import captures

SMALL_FILES = (1_000, 5_000, 100_000, 1_000_000)
_RESTORED_SMALL_FILES = (5_000, 100_000)
_SNAPSHOTS = 200
_HISTORY_FILES = 100
_HISTORY_FILE_BYTES = 256 << 10
_STEP_SECONDS = 3600.0
_REPEATS = 3

CAPTURE_MEMORY = ", memory of the capture process"
STORES = (tools.CIUIC, tools.RESTIC, tools.BORG)
PLACES = (EXT4, XFS, DISK)
ALL = (*STORES, tools.COPY, tools.REFLINK)


def figures(what: str, *, capture: bool = False) -> tuple[Figure, ...]:
    """The figures of a command, in the order of ``_values``."""
    found = [
        Figure(what, "s", False),
        Figure(f"{what}, processor", "s", False),
        Figure(f"{what}, memory", "MB", False),
    ]
    if capture:
        found.append(Figure(f"{what}{CAPTURE_MEMORY}", "MB", False))
        found.append(Figure(f"{what}, from cut to commit", "s", False))
    return tuple(found)


def nothing_changed(files: int) -> str:
    """The name of the figure: a capture of nothing in a tree of so many (at scale 1)."""
    return f"nothing changed, {files:,} files"


def _values(
    used: Used | None, *, capture: bool = False, job: Job | None = None, alone: bool = False
) -> list[float | None]:
    """``alone``: the daemon has no part in it, and its memory is not counted."""
    if used is None:
        return [None] * (5 if capture else 3)
    found: list[float | None] = [used.seconds, used.cpu_seconds]
    found.append((used.command_bytes if alone else used.peak_bytes) / 1e6)
    if capture and job is not None:
        window = captures(job.log)[-1] if job.log else None
        found.append(used.capture_bytes / 1e6 if used.capture_bytes else None)
        found.append(window.ended - window.began if window else None)
    return found


def _to_the_disk(job: Job, used: Used | None) -> Used | None:
    if used is None:
        return None
    began = time.perf_counter()
    fd = os.open(job.beside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs", job.beside)
    finally:
        os.close(fd)
    return used._replace(seconds=used.seconds + time.perf_counter() - began)


def _anew(write: Callable[[Job], None]) -> Step:
    """An empty store, and what ``write`` writes: as the job does, into the directory that is being served already."""

    def run(job: Job) -> None:
        tools.of(job).prepare()
        write(job)

    return preparation(run, before="anew", limit_seconds=_STEP_SECONDS)


def _capture(what: str, *, first: bool, before: Before) -> Step:
    def run(job: Job) -> Measured:
        tool = tools.of(job)
        tool.wake()
        space = _free_bytes(job)
        used = _to_the_disk(job, tool.capture() if first else tool.capture_again())
        taken = (space - _free_bytes(job)) / 1e6 if used else None
        size = _allocated_bytes(tool.store()) / 1e6 if used else None
        return Measured([*_values(used, capture=True, job=job), size, taken])

    more = (Figure(f"{what}, size of the store", "MB", False), Figure(f"{what}, space taken", "MB", False))
    return Step((*figures(what, capture=True), *more), run, before, _STEP_SECONDS)


def _nothing_changed(what: str) -> Step:
    def run(job: Job) -> Measured:
        if job.contender not in STORES:
            return Measured([None] * 5)
        tool = tools.of(job)
        tool.capture_again()  # what the step before has left behind is nobody's nothing
        found = [_values(tool.capture_again(), capture=True, job=job) for _ in range(_REPEATS)]
        return Measured(
            [
                statistics.median(numbers)
                if (numbers := [one for one in column if one is not None])
                else None
                for column in zip(*found, strict=True)
            ]
        )

    return Step(figures(what, capture=True), run, "settled", _STEP_SECONDS)


class Restore(NamedTuple):
    """Which of the restores."""

    what: str
    """Below the directory, "" for all."""
    over: bool = False
    """Over what an earlier one has restored."""
    keep: bool = False
    """For the next one to go over."""


def _restore(name: str, how: Restore) -> Step:
    def run(job: Job) -> Measured:
        tool = tools.of(job)
        to = f"{job.beside}/restored"
        tool.wake()
        used = _to_the_disk(job, tool.restore(how.what, to, over=how.over))
        if not how.keep:
            shutil.rmtree(to, ignore_errors=True)
        return Measured(_values(used, alone=True))

    return Step(figures(name), run, "cold", _STEP_SECONDS)


def _restore_in_place(name: str) -> Step:
    def run(job: Job) -> Measured:
        tool = tools.of(job)
        tool.wake()
        return Measured(_values(_to_the_disk(job, tool.restore_in_place())))

    return Step(figures(name), run, "cold", _STEP_SECONDS)


def _verify(name: str) -> Step:
    def run(job: Job) -> Measured:
        tool = tools.of(job)
        if job.contender != tools.CIUIC:
            return Measured([*_values(tool.verify(), alone=True), None])
        cat_seconds = _cat_seconds(f"{tool.store()}/packs")
        _drop_pages()
        tool.wake()
        used = tool.verify()
        return Measured([*_values(used, alone=True), cat_seconds / used.seconds if used else None])

    return Step(
        (*figures(name), Figure(f"{name}, speed beside cat of the packs", "of cat")),
        run,
        "cold",
        _STEP_SECONDS,
    )


def _cat_seconds(folder: str) -> float:
    names = [f"{top}/{name}" for top, _, names in os.walk(folder) for name in names]
    if not names:
        raise RuntimeError(f"no packs in {folder}")
    began = time.perf_counter()
    with open(os.devnull, "wb") as nothing:
        for name in names:
            # Not sendfile(2) to /dev/null, which reads nothing: as cat(1) reads.
            with open(name, "rb", buffering=0) as file:
                while piece := file.read(128 << 10):
                    nothing.write(piece)
    return time.perf_counter() - began


def _drop_pages() -> None:
    with open("/proc/sys/vm/drop_caches", "wb") as file:
        file.write(b"1")


def _free_bytes(job: Job) -> int:
    found = os.statvfs(job.beside)
    return found.f_bfree * found.f_frsize


def _allocated_bytes(top: str) -> int:
    return sum(
        os.lstat(f"{folder}/{name}").st_blocks * 512 for folder, _, names in os.walk(top) for name in names
    )


def _needs_numpy() -> str:
    return "" if importlib.util.find_spec("numpy") else "numpy is not installed"


def _tree(name: str, share: float, suffix: str) -> Suite:
    def furnish_source(job: Job) -> None:
        tree.make(job.source, job, share)

    def write(job: Job) -> None:
        shutil.copytree(f"{job.source}/tree", job.directory, dirs_exist_ok=True)

    def change(job: Job) -> None:
        tree.change(job, share)

    return Suite(
        name,
        (
            _anew(write),
            _capture(f"first capture{suffix}", first=True, before="uncached"),
            preparation(change),
            _capture(f"incremental{suffix}", first=False, before="settled"),
            _nothing_changed(f"nothing changed{suffix}"),
            _restore(f"restore{suffix}", Restore("", keep=True)),
            _restore(f"restore over existing{suffix}", Restore("", over=True)),
            _restore(f"restore of one directory{suffix}", Restore(tree.ONE_DIRECTORY)),
            _verify(f"verify{suffix}"),
            _restore_in_place(f"restore in place, under protection{suffix}"),
        ),
        furnish_source=furnish_source,
        missing=_needs_numpy,
        only=ALL,
        places=PLACES,
    )


def _small_files() -> Suite:
    """The tree grows from step to step, and each capture finds what is new."""

    def growth(start: int, stop: int) -> Callable[[Job], None]:
        def grow(job: Job) -> None:
            tree.small_files(job.directory, job.count(start) if start else 0, job.count(stop))

        return grow

    steps: list[Step] = []
    for start, stop in zip((0, *SMALL_FILES), SMALL_FILES, strict=False):
        grow = growth(start, stop)
        steps.append(preparation(grow, limit_seconds=_STEP_SECONDS) if start else _anew(grow))
        steps.append(_capture(f"capture up to {stop:,} small files", first=not start, before="settled"))
        steps.append(_nothing_changed(nothing_changed(stop)))
        if stop in _RESTORED_SMALL_FILES:
            steps.append(_restore(f"restore of {stop:,} small files", Restore("")))
    return Suite("small-files", tuple(steps), only=STORES, places=PLACES)


def _history(name: str, snapshots: int) -> Suite:
    def capture_all(job: Job) -> None:
        for number in range(_HISTORY_FILES):
            with open(job.path(str(number)), "wb") as file:
                file.write(os.urandom(_HISTORY_FILE_BYTES))
        tool = tools.of(job)
        for number in range(_count(job)):
            # A file is written anew, another changed in the middle, one is new and one goes.
            with open(job.path(str(number % 10)), "wb") as file:
                file.write(os.urandom(_HISTORY_FILE_BYTES))
            with open(job.path(str(10 + number % 10)), "r+b") as file:
                file.seek(100_000)
                file.write(os.urandom(1000))
            with open(job.path(f"new-{number}"), "wb") as file:
                file.write(os.urandom(_HISTORY_FILE_BYTES))
            if number:
                os.unlink(job.path(f"new-{number - 1}"))
            tool.capture()

    def _count(job: Job) -> int:
        return job.count(snapshots, 4)

    def prune(job: Job) -> Measured:
        tool = tools.of(job)
        tool.wake()
        used = _to_the_disk(job, tool.prune(_count(job) // 2))
        return Measured([*_values(used), _allocated_bytes(tool.store()) / 1e6])

    what = f"prune of half of {snapshots} snapshots"
    size = Figure(f"{what}, size of the store after it", "MB", False)
    return Suite(
        name,
        (
            _anew(capture_all),
            Step((*figures(what), size), prune, "settled", _STEP_SECONDS),
        ),
        only=STORES,
        places=PLACES,
    )


SUITES: Sequence[Suite] = (
    _tree("tree", 1, ""),
    _tree("quarter-tree", 0.25, ", a quarter of the tree"),
    _small_files(),
    _history("history", _SNAPSHOTS),
    _history("short-history", _SNAPSHOTS // 4),
)
