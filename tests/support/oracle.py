"""Oracle of snapshots: each writer's directory must be one moment of its history.

A writer carries out steps that follow from its seed, one changing system call each, in a directory of its
own, and logs when each began and ended. ``History`` is the same directory as a model: its content after n
steps. A snapshot is right if for every writer there is an n whose directory it shows, files marked *not held*
left aside, and if all writers can have been at their n at one instant.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from support.capture_child import Found
from support.databases import wait_for_end_of_input

PAGE: Final = 4096
KINDS: Final = (
    *("append", "append", "fresh", "fresh", "fresh", "over", "cut", "again", "gone"),
    *("cached", "direct", "map", "joined", "truncate", "rename", "rename", "link", "unlink", "make"),
)
NAMES: Final = ("n0", "n1", "n2", "n3")
FRESH: Final = ("fresh-a", "fresh-b")
_MAX_BYTES: Final = 16 * PAGE
_PAUSES_EVERY: Final = 8
_PAUSE_SECONDS: Final = 0.002
"""Pause between bursts, which leaves the capture some of two processors."""
_STAMP: Final = struct.Struct("<qq")


class Step(NamedTuple):
    """System call that changes the directory: kind, name, and a number that it writes."""

    kind: str
    name: str
    other: str
    number: int


class History:
    """A writer's directory after ``count`` steps."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.count = 0
        page = bytes(PAGE)
        self.files: dict[str, bytearray] = {
            name: bytearray(page) for name in ("log", "cached", "direct", "map", "joined")
        } | {name: bytearray() for name in FRESH}
        self.detached: dict[str, bytearray] = {}
        """Removed while it was open, and still written to."""

    def step(self) -> Step:
        """Take the next step in the model."""
        while True:
            rng = self._rng
            names = [name for name in NAMES if name in self.files]
            step = Step(
                rng.choice(KINDS), rng.choice(names or NAMES), rng.choice(NAMES), rng.randrange(1, 250)
            )
            if step.kind in ("fresh", "over", "cut", "again", "gone"):
                step = step._replace(name=rng.choice(FRESH))
            if self._apply(step):
                self.count += 1
                return step

    def _apply(self, step: Step) -> bool:
        """Apply the step to the model; return False if it would change nothing or fail."""
        files, name, other = self.files, step.name, step.other
        byte = bytes([step.number])
        fresh = self.detached.get(name, files.get(name, bytearray()))
        match step.kind:
            case "append":
                files["log"] += byte * 100
            case "fresh" if len(fresh) < _MAX_BYTES:
                fresh += byte * 700
            case "over" if len(fresh) >= 200:
                fresh[100:200] = byte * 100
            case "cut" if len(fresh) > step.number:
                del fresh[step.number :]
            case "again":
                self.detached.pop(name, None)
                files[name] = bytearray()
            case "gone" if name in files:
                self.detached[name] = files.pop(name)
            case "cached" | "direct" | "map" | "joined":
                files[step.kind][:] = byte * PAGE if step.kind == "direct" else byte + files[step.kind][1:]
            case "truncate" if name in files and len(files[name]) != step.number:
                content = files[name]
                content[:] = bytes(content[: step.number]).ljust(step.number, b"\0")
            case "rename" if name in files and name != other and files.get(other) is not files[name]:
                files[other] = files.pop(name)
            case "link" if name in files and other not in files:
                files[other] = files[name]
            case "unlink" if name in files:
                del files[name]
            case "make" if other not in files:
                files[other] = bytearray()
            case _:
                return False
        return True


class Writer:
    """Executor of the steps in a real directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("log", "cached", "direct", "map", "joined"):
            (folder / name).write_bytes(bytes(PAGE))
        self._fds = {
            "log": os.open(folder / "log", os.O_WRONLY | os.O_APPEND),
            "cached": os.open(folder / "cached", os.O_RDWR),
            "direct": os.open(folder / "direct", os.O_WRONLY | os.O_DIRECT),
            "reader": os.open(folder / "joined", os.O_RDONLY),
        }
        self._page = mmap.mmap(-1, PAGE)
        self._maps = {name: self._mapped(folder / name) for name in ("map", "joined")}
        for name in FRESH:
            self._make_fresh(name)

    @staticmethod
    def _mapped(path: Path) -> mmap.mmap:
        fd = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(fd, PAGE)
        finally:
            os.close(fd)

    def _make_fresh(self, name: str) -> None:
        self._fds[name] = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def do(self, step: Step) -> None:
        path, byte = self._folder / step.name, bytes([step.number])
        fd = self._fds.get(step.name, -1)
        match step.kind:
            case "append":
                os.write(self._fds["log"], byte * 100)
            case "fresh":
                os.pwrite(fd, byte * 700, os.fstat(fd).st_size)
            case "over":
                os.pwrite(fd, byte * 100, 100)
            case "cut":
                os.ftruncate(fd, step.number)
            case "again":
                os.close(fd)
                self._make_fresh(step.name)
            case "gone":
                os.unlink(path)
            case "cached":
                os.pwrite(self._fds["cached"], byte, 0)
            case "direct":
                self._page[:] = byte * PAGE
                os.pwrite(self._fds["direct"], self._page, 0)
            case "map" | "joined":
                self._maps[step.kind][0] = step.number
                self._maps[step.kind].flush()
            case "truncate":
                os.truncate(path, step.number)
            case "rename":
                os.rename(path, self._folder / step.other)
            case "link":
                os.link(path, self._folder / step.other)
            case "unlink":
                os.unlink(path)
            case "make":
                os.close(os.open(self._folder / step.other, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def write(folder: Path, log: Path, seed: int, stop: Callable[[], bool]) -> None:
    """Work in ``folder`` until ``stop``; log each step's start and end in monotonic nanoseconds."""
    history, writer = History(seed), Writer(folder)
    with log.open("wb", buffering=0) as stamps:
        while not stop():
            step = history.step()
            began = time.monotonic_ns()
            writer.do(step)
            stamps.write(_STAMP.pack(began, time.monotonic_ns()))
            if not step.number % _PAUSES_EVERY:
                time.sleep(_PAUSE_SECONDS)


class Moments(NamedTuple):
    """Step counts whose directory a snapshot shows, each with its possible range of nanoseconds."""

    spans: tuple[tuple[int, int], ...]
    why: str
    """Reason why there is no such count."""


class Oracle:
    """Judge of one writer's snapshots, in the order of their cuts."""

    def __init__(self, seed: int, log: Path) -> None:
        self._history = History(seed)
        self._log = log

    def judge(self, view: Mapping[str, Found], asked_ns: int, answered_ns: int) -> Moments:
        """Judge ``view``, the writer's directory in a snapshot that was requested and cut at these times."""
        stamps = list(_STAMP.iter_unpack(self._log.read_bytes()[: self._size()]))
        low = sum(1 for _, ended in stamps if ended < asked_ns)
        high = sum(1 for began, _ in stamps if began < answered_ns)
        while self._history.count < low:
            self._history.step()
        spans, why = [], f"no moment from {low} to {high}: "
        while True:
            count = self._history.count
            wrong = _difference(self._history.files, view)
            if not wrong:
                began = stamps[count - 1][0] if count else 0
                ended = stamps[count][1] if count < len(stamps) else 1 << 62
                spans.append((began, ended))
            why += f"[{count}] {wrong} "
            if count >= high:
                return Moments(tuple(spans), why)
            self._history.step()

    def _size(self) -> int:
        return self._log.stat().st_size // _STAMP.size * _STAMP.size


def _difference(files: Mapping[str, bytearray], view: Mapping[str, Found]) -> str:
    if files.keys() != view.keys():
        return f"names {sorted(files.keys() ^ view.keys())}"
    for name, content in files.items():
        found = view[name]
        if found.held and found.content != content:
            return f"{name}: {found.content[:8].hex()}+{len(found.content)} for {content[:8].hex()}+{len(content)}"
    return ""


def share_an_instant(moments: list[Moments]) -> bool:
    """Return whether all writers can have been at one of their moments at one instant."""
    begins = [began for moment in moments for began, _ in moment.spans]
    return any(
        all(any(low <= instant <= high for low, high in moment.spans) for moment in moments)
        for instant in begins
    )


# A writer's process: folder, log, seed; it ends with its standard input.
if __name__ == "__main__":
    import threading

    end = threading.Event()
    threading.Thread(target=wait_for_end_of_input, args=(end,), daemon=True).start()
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), end.is_set)
