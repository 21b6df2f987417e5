"""What the readers of formats share: values of verdicts, refusals, and bounded reads of a hostile file.

A read stays within the size of the file, and there are no more of them than a limit allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple

from ciuic.units import plural

VerdictState = Literal["GOOD", "TORN", "UNKNOWN"]
DEFECT: Final = "its reader failed, which is a defect in ciuic"
"""Beginning of the reason of a file that a reader has not refused as it should."""
UNREADABLE: Final = "it cannot be read"
"""Beginning of the reason of a file that the repository or the disk cannot give."""
RULES: Final = 4
"""Number of the rules by which files and directories are judged. Raised with each change that may lead to another verdict, so that
those that were stored (`ciuic.verdicts.records`) are made anew."""


class Verdict(NamedTuple):
    """Verdict on a file or checkpoint."""

    state: VerdictState
    reason: str
    """Finding, or the reason why nothing can be said."""
    format: str = ""
    """Name of the format; empty if it is not known."""
    not_finite: int | None = None
    """Floating numbers that are NaN or infinite, as far as they were looked at; None if none was found and not all were looked at: of a
    format whose numbers are not known here, or too large. Says nothing of the state: a program may mean them."""

    @property
    def finding(self) -> str:
        """The reason, with what is known of its numbers."""
        if self.not_finite:
            return f"{self.reason}; {self.of_numbers}"
        return (
            f"{self.reason}; not all numbers were looked at"
            if self.is_good and self.not_finite is None
            else self.reason
        )

    @property
    def of_numbers(self) -> str:
        """Its numbers that are not finite, in words; empty for none."""
        count = self.not_finite or 0
        return f"{plural(count, 'number')} {'is' if count == 1 else 'are'} not finite" if count else ""

    @property
    def is_foreign(self) -> bool:
        """True if its content is of no format that is known: data or a cache of the program, perhaps."""
        return (
            self.state == "UNKNOWN" and not self.format and not self.reason.startswith((UNREADABLE, DEFECT))
        )

    @property
    def is_good(self) -> bool:
        """True for GOOD."""
        return self.state == "GOOD"


class Checkpoint(NamedTuple):
    """A checkpoint and the verdict on it."""

    path: bytes
    """Absolute path of the file or directory; of a TensorFlow checkpoint, its prefix."""
    verdict: Verdict
    size_bytes: int
    files: tuple[bytes, ...]
    """Relative paths of its files, from the directory in which it was found; of a symbolic link, also of where it leads in the root."""


class Piece(NamedTuple):
    """Range of a file that a complete writer has written."""

    start: int
    stop: int
    crc32: int | None = None
    """CRC-32 of exactly these bytes, if the file has one."""


class Numbers(NamedTuple):
    """Range of a file with the floating numbers of one tensor."""

    start: int
    stop: int
    kind: str
    """Name in `ciuic.verdicts.not_finite.KINDS`."""
    is_big_endian: bool = False


class Structure(NamedTuple):
    """Structure of a file that is complete as far as its headers tell."""

    format: str
    content: str
    """Content in words: ``12 tensors``."""
    pieces: tuple[Piece, ...]
    """Ranges in which a hole means that the data may never have been written."""
    last_item: tuple[int, int] | None = None
    """Range of the last number in the file. If it is zero, an end that was never written would look the same. None if the
    end has a structure that was checked."""
    numbers: Callable[[], Iterable[Numbers]] | None = None
    """Finds the floating numbers, within what is left of the reader's limits: raises TornContent or NotJudged. None if that is not known."""


class TornContent(Exception):
    """The file lacks something that its own headers promise; the text names it."""


class OtherFormat(Exception):
    """The file has another format."""


class NotJudged(Exception):
    """The file has the format, and nothing can be said of it; the text says why."""


_MAX_READ_BYTES: Final = 64 << 20
"""Limit of all bytes that are read to judge one file. The headers of large checkpoints have a few megabytes."""
_MAX_READS: Final = 200_000
MAX_HEADER_BYTES: Final = 16 << 20
"""Limit of one header. That of 100,000 tensors has about ten megabytes."""

MAX_STEPS: Final = 2_000_000
"""Limit of what is looked at to judge one file: some seconds of processor time. A count, so that a verdict does not depend on how busy
the machine is."""

ReadRange = Callable[[int, int], bytes]


class BoundedReader:
    """Reader of one file.

    Args:
        read: Returns the bytes at (offset, length), fewer only if the file ends or was cut while it was read.
        size_bytes: Size of the file.
        name: Name of the file in its directory.
    """

    def __init__(self, read: ReadRange, size_bytes: int, name: bytes = b"") -> None:
        self._read = read
        self.size_bytes = size_bytes
        self.name = name
        self.left_bytes = _MAX_READ_BYTES
        self._left_reads = _MAX_READS
        self._left_steps = MAX_STEPS

    def has_suffix(self, *suffixes: str) -> bool:
        """Return whether the name ends so, in any case."""
        name = self.name.lower()
        return any(name.endswith(suffix.encode("ascii")) for suffix in suffixes)

    def at(self, offset: int, length: int, what: str) -> bytes:
        """Return exactly these bytes; ``what`` names them for the reason.

        Raises:
            TornContent: the file ends before.
            NotJudged: a limit is reached.
        """
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise TornContent(
                f"{what} is cut: it needs {max(0, offset) + length} bytes, the file has {self.size_bytes}"
            )
        self._left_reads -= 1
        self.left_bytes -= length
        if length > MAX_HEADER_BYTES or self.left_bytes < 0 or self._left_reads < 0:
            raise NotJudged(f"{what} is larger than what is read for a verdict")
        data = self._read(offset, length)
        if len(data) != length:
            raise TornContent(f"{what} is cut")
        return data

    def spend(self, steps: int = 1) -> None:
        """Count steps of work that no read limits: a structure may be met again and again; raise NotJudged at the limit."""
        self._left_steps -= steps
        if self._left_steps < 0:
            raise NotJudged("it has more structures than are followed for a verdict")

    def up_to(self, offset: int, length: int, what: str) -> bytes:
        """Return these bytes as far as the file has them."""
        length = min(length, self.size_bytes - offset)
        return self.at(offset, length, what) if length > 0 else b""

    def starts_with_zeros(self, length: int = 8) -> bool:
        """Return whether the file begins with zeros, as one that was only allocated."""
        head = self.up_to(0, length, "the beginning")
        return len(head) > 0 and not any(head)
