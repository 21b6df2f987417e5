"""Files that a checkpoint needs, as its index or marker tells."""

from __future__ import annotations

from typing import Final, NamedTuple

from ciuic.printable import one_line
from ciuic.verdicts.bounded_reader import BoundedReader
from ciuic.verdicts.model import NotJudged, TornContent
from ciuic.verdicts.sources import DirectorySource, FileSource

MAX_PARTS: Final = 1 << 14
MAX_DOCUMENT_BYTES: Final = 16 << 20


class PartsNeeded(NamedTuple):
    """A checkpoint of several files."""

    format: str
    name: bytes = b""
    """Name of the checkpoint in the directory; empty for the directory itself."""
    files: tuple[bytes, ...] = ()
    """Relative paths of files whose own format is judged."""
    raw: tuple[tuple[bytes, int], ...] = ()
    """(Relative path, least size in bytes) of files without a structure of their own."""
    tail_bytes: int = 1
    """Length of an end of such a file that is not all zeros."""
    torn: str = ""
    """Reason why the checkpoint is TORN, also if all its files are whole."""
    doubt: str = ""
    """Reason why it is at best UNKNOWN."""
    taken: frozenset[bytes] = frozenset()
    """Names in the directory that are a part of it."""


def read_document(source: FileSource, what: str) -> bytes:
    """Return a whole document; raise TornContent or NotJudged."""
    if source.size_bytes > MAX_DOCUMENT_BYTES:
        raise NotJudged(f"{what} is larger than what is read for a verdict")
    data = BoundedReader(source.read, source.size_bytes, source.name).at(0, source.size_bytes, what)
    if not data.strip(b"\0 \r\n\t"):
        raise TornContent(f"{what} is empty")
    return data


def document_of(directory: DirectorySource, name: bytes, what: str) -> bytes | None:
    """Return the document of this name; None where there is none."""
    source = directory.file(name)
    return None if source is None else read_document(source, what)


def shown_name(name: bytes) -> str:
    """Return a name for a reason: one line, for any bytes."""
    return one_line(name[:200])
