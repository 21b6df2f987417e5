"""The page on which a trainer shows that it is alive: memory that others read without asking it.

An anonymous file (memfd) of one page that cannot shrink. A beat is three stores, no system call. Guarantees to who reads: a
descriptor that is no such page is refused, reading never waits and never faults, and every number is whole; two of them may be of
two beats. What it says is the trainer's own word.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import struct
import time
from typing import Final, NamedTuple

_BYTES: Final = 4096
_MAGIC: Final = 0x31_74_61_65_62_75_69_63
_BEATS, _STEP, _TIME, _GOODBYE = 1, 2, 3, 4
_TEXT_AT: Final = 256
_TEXT_BYTES: Final = 512
_ADD_SEALS: Final = getattr(fcntl, "F_ADD_SEALS", 1033)
_GET_SEALS: Final = getattr(fcntl, "F_GET_SEALS", 1034)
_SEAL_SHRINK: Final = 2
_WORDS: Final = struct.Struct("<5Q")


class Goodbye(enum.IntEnum):
    """What the trainer said of its end."""

    NONE = 0
    CLOSED = 1
    """It is done."""
    PREEMPTED = 2
    """It was told to end, has saved, and ends."""
    FAILED = 3
    """By an exception, or with a status that says so; the text says which."""


class Pulse(NamedTuple):
    """What a page said at one moment."""

    beats: int = 0
    step: int = 0
    beat_ns: int = 0
    """On the monotonic clock."""
    goodbye: Goodbye = Goodbye.NONE
    reason: str = ""


class Page:
    """The trainer's side."""

    def __init__(self) -> None:
        """OSError where there is no memory for it."""
        self.fd = os.memfd_create("ciuic-beat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _BYTES)
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_SHRINK)
            self._map = mmap.mmap(self.fd, _BYTES)
        except BaseException:
            self.close()
            raise
        # Not by struct, which stores byte by byte: who reads would find half a number.
        self._words = memoryview(self._map).cast("Q")
        self._words[0] = _MAGIC
        self._pid = os.getpid()

    def beat(self, step: int | None = None) -> None:
        """It lives."""
        words = self._words
        if step is not None and step >= 0:
            words[_STEP] = step
        words[_TIME] = time.monotonic_ns()
        words[_BEATS] += 1

    def say_goodbye(self, how: Goodbye, reason: str = "") -> None:
        """Nothing in a forked child: it does not speak for its parent. NONE takes back what was said."""
        if os.getpid() != self._pid:
            return
        text = reason.encode("utf-8", "replace")[: _TEXT_BYTES - 1]
        self._map[_TEXT_AT : _TEXT_AT + _TEXT_BYTES] = text.ljust(_TEXT_BYTES, b"\0")
        self._words[_GOODBYE] = how

    def close(self) -> None:
        """Lets go of the descriptor; what is written from now on is seen by those who have one of their own."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    @property
    def goodbye(self) -> Goodbye:
        return Goodbye(self._words[_GOODBYE])


def check_page(fd: int) -> None:
    """ValueError for what is no page: reading a file of another kind could wait for ever."""
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        raise ValueError("not memory that was made for this") from None
    if not seals & _SEAL_SHRINK or os.fstat(fd).st_size < _TEXT_AT + _TEXT_BYTES:
        raise ValueError("memory that may shrink")
    read_page(fd)


def read_page(fd: int) -> Pulse:
    """ValueError for what says that it is something else."""
    data = os.pread(fd, _TEXT_AT + _TEXT_BYTES, 0)
    magic, beats, step, beat_ns, goodbye = _WORDS.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("not a page of ours")
    text = data[_TEXT_AT:].partition(b"\0")[0].decode("utf-8", "replace")
    reason = "".join(character if character.isprintable() else " " for character in text).strip()
    known = Goodbye(goodbye) if goodbye <= max(Goodbye) else Goodbye.NONE
    return Pulse(beats, step, beat_ns, known, reason)
