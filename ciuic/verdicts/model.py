"""Values of verdicts, and the refusals of the modules that read a format; no behaviour."""

from __future__ import annotations

from typing import Literal, NamedTuple

VerdictState = Literal["GOOD", "TORN", "UNKNOWN"]


class Verdict(NamedTuple):
    """Verdict on a file or checkpoint."""

    state: VerdictState
    reason: str
    """Finding, or the reason why nothing can be said."""
    format: str = ""
    """Name of the format; empty if it is not known."""

    @property
    def is_good(self) -> bool:
        """True for GOOD."""
        return self.state == "GOOD"


class Piece(NamedTuple):
    """Range of a file that a complete writer has written."""

    start: int
    stop: int
    crc32: int | None = None
    """CRC-32 of exactly these bytes, if the file has one."""


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


class TornContent(Exception):
    """The file lacks something that its own headers promise; the text names it."""


class OtherFormat(Exception):
    """The file has another format."""


class NotJudged(Exception):
    """The file has the format, and nothing can be said of it; the text says why."""
