"""Jobs of the cut torture: `python -m torture.cut_writers KIND SLOT SEED COUNTERS ROOT_A ROOT_B`.

A writer notes in the counters, before an operation, that it has begun, and after it, that it has returned.
The counters are a mapped file outside the roots: [stop, begun and returned of each slot], 8 bytes each.
cut_judge describes what each kind does. An error that a writer sees is one that a job would see: it ends with
a traceback.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torture import cut_judge as judge

SYNC_EVERY = 16
"""Stores of the mapping writer between two msyncs."""


class Counters:
    """The mapped file of counters, for writers and torture."""

    def __init__(self, path: Path, slots: int = 0) -> None:
        if slots:
            path.write_bytes(bytes(8 * (1 + 2 * slots)))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = (ctypes.c_uint64 * (len(self._map) // 8)).from_buffer(self._map)

    def stop(self) -> None:
        self._words[0] = 1

    @property
    def stopping(self) -> bool:
        return bool(self._words[0])

    def begin(self, slot: int, number: int) -> None:
        self._words[1 + 2 * slot] = number

    def returned(self, slot: int, number: int) -> None:
        self._words[2 + 2 * slot] = number

    def all_begun(self) -> list[int]:
        return list(self._words[1::2])

    def all_returned(self) -> list[int]:
        return list(self._words[2::2])


def prepare(kind: str, slot: int, seed: int, roots: tuple[Path, Path]) -> None:
    """Make and sync a writer's files of before its first operation, ahead of the first snapshot."""
    name = f"{kind}{slot}"
    if kind.startswith("append") or kind == "fresh":
        (roots[slot % 2] / name).mkdir()
    elif kind in ("overwrite", "direct"):
        records = b"".join(judge.slot_record(seed, number) for number in range(judge.SLOTS))
        (roots[slot % 2] / name).write_bytes(records)
    elif kind == "mapped":
        words = b"".join(
            judge.word(number).to_bytes(8, "little").ljust(judge.PAGE, b"\0") for number in range(judge.SLOTS)
        )
        (roots[slot % 2] / name).write_bytes(words)
    elif kind == "names":
        for root in roots:
            (root / name).mkdir()
            for folder in ("a", "b", "a/c"):
                (root / name / folder).mkdir()


def _appends(slot: int, seed: int, roots: tuple[Path, Path], kind: str) -> Callable[[int], None]:
    folder = roots[slot % 2] / f"{kind}{slot}"
    fd = -1

    def operate(number: int) -> None:
        nonlocal fd
        lap, within = divmod(number, judge.LAP)
        if within == 0:
            if fd >= 0:
                os.close(fd)
            fd = os.open(folder / f"lap{lap}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            if lap >= 2:
                os.unlink(folder / f"lap{lap - 2}")
        _check_length(os.write(fd, record := judge.appended(seed, number)), record)
        if kind == "append-synced":
            os.fsync(fd)

    return operate


def _fresh(slot: int, seed: int, roots: tuple[Path, Path], kind: str) -> Callable[[int], None]:
    folder = roots[slot % 2] / f"{kind}{slot}"
    fd = -1

    def operate(number: int) -> None:
        nonlocal fd
        lap, within = divmod(number, judge.FRESH_LAP)
        if within == 0:
            if fd >= 0:
                os.close(fd)
                # As between two checkpoints, so that some cuts meet no open file.
                time.sleep(0.7)
            fd = os.open(folder / f"lap{lap}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            if lap >= 2:
                os.unlink(folder / f"lap{lap - 2}")
        _check_length(os.write(fd, record := judge.slot_record(seed, number)), record)

    return operate


def _check_length(written: int, record: bytes) -> None:
    if written != len(record):
        raise OSError(f"write returned {written} for {len(record)} bytes")


def _overwrites(slot: int, seed: int, roots: tuple[Path, Path], kind: str) -> Callable[[int], None]:
    fd = os.open(roots[slot % 2] / f"{kind}{slot}", os.O_RDWR | (os.O_DIRECT if kind == "direct" else 0))
    # The flag O_DIRECT needs an aligned buffer.
    buffer = mmap.mmap(-1, judge.PAGE)

    def operate(number: int) -> None:
        record = judge.slot_record(seed, number + judge.SLOTS)
        buffer[:] = record
        _check_length(os.pwritev(fd, [buffer], number % judge.SLOTS * judge.PAGE), record)

    return operate


def _mapped(slot: int, _seed: int, roots: tuple[Path, Path], kind: str) -> Callable[[int], None]:
    with open(roots[slot % 2] / f"{kind}{slot}", "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    words = (ctypes.c_uint64 * (len(mapping) // 8)).from_buffer(mapping)

    def operate(number: int) -> None:
        stored = number + judge.SLOTS
        if stored % SYNC_EVERY == 0:
            mapping.flush()
        words[number % judge.SLOTS * judge.PAGE // 8] = judge.word(stored)

    return operate


def _sequence(slot: int, _seed: int, roots: tuple[Path, Path], kind: str) -> Callable[[int], None]:
    fds = [
        os.open(roots[strip % 2] / f"{kind}{slot}-{strip}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for strip in range(judge.STRIPS)
    ]

    def operate(number: int) -> None:
        line, strip = divmod(number, judge.STRIPS)
        _check_length(os.write(fds[strip], text := judge.sequence_line(line)), text)
        os.fsync(fds[strip])

    return operate


def _names(slot: int, seed: int, roots: tuple[Path, Path], kind: str) -> Callable[[int], None]:
    history = judge.NameHistory(seed)

    def operate(number: int) -> None:
        step = history.next()
        top = os.fsencode(roots[step.root] / f"{kind}{slot}") + b"/"
        path, to = top + step.path, top + step.to
        if step.do == "create":
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        elif step.do == "fill":
            with open(path, "wb") as file:
                file.write(judge.filling(step.token))
                file.flush()
                os.fsync(file.fileno())
        elif step.do == "rename":
            os.rename(path, to)
        else:
            {"unlink": os.unlink, "mkdir": os.mkdir, "rmdir": os.rmdir}[step.do](path)

    return operate


KINDS: dict[str, Callable[[int, int, tuple[Path, Path], str], Callable[[int], None]]] = {
    "append": _appends,
    "append-synced": _appends,
    "fresh": _fresh,
    "overwrite": _overwrites,
    "direct": _overwrites,
    "mapped": _mapped,
    "sequence": _sequence,
    "names": _names,
}


def main() -> None:
    kind, slot, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    counters = Counters(Path(sys.argv[4]))
    operate = KINDS[kind](slot, seed, (Path(sys.argv[5]), Path(sys.argv[6])), kind)
    rng = random.Random(seed)
    number = 0
    while not counters.stopping:
        # Bursts with pauses: a cut must meet writers at work and between two operations.
        for _ in range(rng.randrange(1, 60)):
            counters.begin(slot, number + 1)
            operate(number)
            number += 1
            counters.returned(slot, number)
        time.sleep(rng.random() * 0.06)


if __name__ == "__main__":
    main()
