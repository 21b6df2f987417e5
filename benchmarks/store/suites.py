"""Suites of `make bench-store`.

Each round of a suite begins with an empty store and a newly written directory. The time of a capture or
restore includes syncfs(2) after the command, because some tools wait for the disk themselves and others leave
the writing to the kernel. A capture that finds no change writes nothing, so only the command is timed. Cold
captures and restores start with no file page in the page cache except those of the tool's own program.
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


def command_figures(what: str, *, capture: bool = False) -> tuple[Figure, ...]:
    """Return the figures of a command, in the order of ``_values``."""
    figures = [
        Figure(what, "s", False),
        Figure(f"{what}, processor", "s", False),
        Figure(f"{what}, memory", "MB", False),
    ]
    if capture:
        figures.append(Figure(f"{what}{CAPTURE_MEMORY}", "MB", False))
        figures.append(Figure(f"{what}, from cut to commit", "s", False))
    return tuple(figures)


def nothing_changed(files: int) -> str:
    """Return the name of the figure: a capture that finds no change in a tree of ``files`` (at scale 1)."""
    return f"nothing changed, {files:,} files"


def _values(
    used: Used | None, *, capture: bool = False, job: Job | None = None, alone: bool = False
) -> list[float | None]:
    """Return the values of ``command_figures``; ``alone`` leaves out the memory of the daemon."""
    if used is None:
        return [None] * (5 if capture else 3)
    values: list[float | None] = [used.seconds, used.cpu_seconds]
    values.append((used.command_bytes if alone else used.peak_bytes) / 1e6)
    if capture and job is not None:
        window = captures(job.log)[-1] if job.log else None
        values.append(used.capture_bytes / 1e6 if used.capture_bytes else None)
        values.append(window.ended - window.began if window else None)
    return values


def _with_sync(job: Job, used: Used | None) -> Used | None:
    """Sync the place's file system, and return ``used`` with the seconds that this took added."""
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


def _empty_store(write: Callable[[Job], None]) -> Step:
    """Return a step that makes an empty store and calls ``write`` on the already served directory."""

    def run(job: Job) -> None:
        tools.tool_of(job).prepare()
        write(job)

    return preparation(run, before="anew", limit_seconds=_STEP_SECONDS)


def _capture(what: str, *, first: bool, before: Before) -> Step:
    def run(job: Job) -> Measured:
        tool = tools.tool_of(job)
        tool.wake()
        free_before = _free_bytes(job)
        used = _with_sync(job, tool.capture() if first else tool.capture_again())
        taken = (free_before - _free_bytes(job)) / 1e6 if used else None
        size = _allocated_bytes(tool.store()) / 1e6 if used else None
        return Measured([*_values(used, capture=True, job=job), size, taken])

    sizes = (Figure(f"{what}, size of the store", "MB", False), Figure(f"{what}, space taken", "MB", False))
    return Step((*command_figures(what, capture=True), *sizes), run, before, _STEP_SECONDS)


def _capture_unchanged(what: str) -> Step:
    def run(job: Job) -> Measured:
        if job.contender not in STORES:
            return Measured([None] * 5)
        tool = tools.tool_of(job)
        # Not measured: this capture stores the changes that the preceding step has left.
        tool.capture_again()
        rounds = [_values(tool.capture_again(), capture=True, job=job) for _ in range(_REPEATS)]
        return Measured(
            [
                statistics.median(numbers)
                if (numbers := [value for value in column if value is not None])
                else None
                for column in zip(*rounds, strict=True)
            ]
        )

    return Step(command_figures(what, capture=True), run, "settled", _STEP_SECONDS)


class Restore(NamedTuple):
    """Variant of a restore."""

    what: str
    """Path below the directory; empty for all of it."""
    over: bool = False
    """True if it overwrites what an earlier restore has left."""
    keep: bool = False
    """True if the restored files stay, for a later restore to overwrite."""


def _restore(name: str, variant: Restore) -> Step:
    def run(job: Job) -> Measured:
        tool = tools.tool_of(job)
        to = f"{job.beside}/restored"
        tool.wake()
        used = _with_sync(job, tool.restore(variant.what, to, over=variant.over))
        if not variant.keep:
            shutil.rmtree(to, ignore_errors=True)
        return Measured(_values(used, alone=True))

    return Step(command_figures(name), run, "cold", _STEP_SECONDS)


def _restore_in_place(name: str) -> Step:
    def run(job: Job) -> Measured:
        tool = tools.tool_of(job)
        tool.wake()
        return Measured(_values(_with_sync(job, tool.restore_in_place())))

    return Step(command_figures(name), run, "cold", _STEP_SECONDS)


def _verify(name: str) -> Step:
    def run(job: Job) -> Measured:
        tool = tools.tool_of(job)
        if job.contender != tools.CIUIC:
            return Measured([*_values(tool.verify(), alone=True), None])
        cat_seconds = _cat_seconds(f"{tool.store()}/packs")
        _drop_pages()
        tool.wake()
        used = tool.verify()
        return Measured([*_values(used, alone=True), cat_seconds / used.seconds if used else None])

    return Step(
        (*command_figures(name), Figure(f"{name}, speed beside cat of the packs", "of cat")),
        run,
        "cold",
        _STEP_SECONDS,
    )


def _cat_seconds(folder: str) -> float:
    names = [f"{top}/{name}" for top, _, names in os.walk(folder) for name in names]
    if not names:
        raise RuntimeError(f"no packs in {folder}")
    began = time.perf_counter()
    with open(os.devnull, "wb") as null_device:
        for name in names:
            # read and write, as cat(1) does: sendfile(2) to /dev/null would read nothing.
            with open(name, "rb", buffering=0) as file:
                while piece := file.read(128 << 10):
                    null_device.write(piece)
    return time.perf_counter() - began


def _drop_pages() -> None:
    # A test that only wants to see the benchmark run must not take the pages of all others.
    if "CIUIC_BENCH_WARM" in os.environ:
        return
    with open("/proc/sys/vm/drop_caches", "wb") as file:
        file.write(b"1")


def _free_bytes(job: Job) -> int:
    status = os.statvfs(job.beside)
    return status.f_bfree * status.f_frsize


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
            _empty_store(write),
            _capture(f"first capture{suffix}", first=True, before="uncached"),
            preparation(change),
            _capture(f"incremental{suffix}", first=False, before="settled"),
            _capture_unchanged(f"nothing changed{suffix}"),
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
    """Return a suite whose tree grows from step to step; each capture stores the new files."""

    def growth(start: int, stop: int) -> Callable[[Job], None]:
        def grow(job: Job) -> None:
            tree.small_files(job.directory, job.count(start) if start else 0, job.count(stop))

        return grow

    steps: list[Step] = []
    for start, stop in zip((0, *SMALL_FILES), SMALL_FILES, strict=False):
        grow = growth(start, stop)
        steps.append(preparation(grow, limit_seconds=_STEP_SECONDS) if start else _empty_store(grow))
        steps.append(_capture(f"capture up to {stop:,} small files", first=not start, before="settled"))
        steps.append(_capture_unchanged(nothing_changed(stop)))
        if stop in _RESTORED_SMALL_FILES:
            steps.append(_restore(f"restore of {stop:,} small files", Restore("")))
    return Suite("small-files", tuple(steps), only=STORES, places=PLACES)


def _history(name: str, snapshots: int) -> Suite:
    def capture_all(job: Job) -> None:
        for number in range(_HISTORY_FILES):
            with open(job.path(str(number)), "wb") as file:
                file.write(os.urandom(_HISTORY_FILE_BYTES))
        tool = tools.tool_of(job)
        for number in range(_count(job)):
            # Each snapshot has one file rewritten, one changed in the middle, one created and one removed.
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
        tool = tools.tool_of(job)
        tool.wake()
        used = _with_sync(job, tool.prune(_count(job) // 2))
        return Measured([*_values(used), _allocated_bytes(tool.store()) / 1e6])

    what = f"prune of half of {snapshots} snapshots"
    size = Figure(f"{what}, size of the store after it", "MB", False)
    return Suite(
        name,
        (
            _empty_store(capture_all),
            Step((*command_figures(what), size), prune, "settled", _STEP_SECONDS),
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
