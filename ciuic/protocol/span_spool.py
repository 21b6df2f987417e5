"""A span of each snapshot that has ended, as files, for the exporter, which sends them to a tracing system: the daemon has no network.

Guarantees: a spool takes at most two files of `MAX_BYTES`, ``NAME`` and the older ``NAME.1``; the oldest spans yield. A reader sees
whole lines, and knows how many spans it has missed: they are numbered. Nothing is synced; a reboot empties the runtime directories.

Format: lines of JSON. The first is a `_Header`, each further one a `Span` whose number is the header's plus its place.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from ciuic.structs import decode_json
from ciuic.system.disk import Disk, open_locked, read_regular
from ciuic.types import MAX_TIME_NS

SPANS_NAME: Final = "spans.jsonl"
"""Spool of the daemon in its runtime directory."""
MAX_BYTES: Final = 1 << 20
"""Size at which a file is set aside: about 2,500 spans."""
_MAX_LINE_BYTES: Final = 64 << 10

Attribute = str | int | float | list[str]
_TimeNs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_NS)]


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Course of a snapshot from its cut to its end."""

    repository: str
    snapshot: str
    start_ns: _TimeNs
    end_ns: _TimeNs
    error: str = ""
    """Why it failed; empty: it did not."""
    attributes: dict[str, Attribute] = {}


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    series: str
    """Random name of a numbering."""
    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    """Number of the first span of the file."""


class SpoolPosition(msgspec.Struct, frozen=True):
    """Number of the next span that a reader wants."""

    series: str = ""
    number: int = 0


class SpoolPart(NamedTuple):
    """Spans that were read."""

    spans: list[Span]
    position: SpoolPosition
    """Where to read on once these were taken."""
    missed: int
    """Spans that were thrown away before they could be read, or are damaged."""


def trace_id(repository: str, snapshot: str) -> int:
    """Return the id of the trace of a snapshot, 128 bits."""
    return _digest(16, "trace", repository, snapshot)


def span_id(span: Span) -> int:
    """Return the id of a span, 64 bits; the same for the same snapshot, so that a span that was sent twice can be told."""
    return _digest(8, "span", span.repository, span.snapshot)


def _digest(size: int, *parts: str) -> int:
    text = "\0".join(("ciuic", *parts)).encode("utf-8", "surrogateescape")
    # 0 is no id (W3C Trace Context).
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "big") or 1


def append_spans(path: Path, spans: Sequence[Span], max_bytes: int = MAX_BYTES) -> None:
    """Append spans to a spool, readable by every user of the host. Raises OSError.

    The directory is on tmpfs, and must be writable by the caller alone.
    """
    lines = b"".join(_encode(span) for span in spans)
    # Another writer may set the file aside meanwhile: the lock is on the one that is there.
    fd = open_locked(path, mode=0o644, wait=True)
    # Unbuffered: a reader sees whole lines, and the lock ends with the descriptor.
    with os.fdopen(fd, "r+b", buffering=0) as stream:
        size = os.fstat(fd).st_size
        header = _header(stream.read(_MAX_LINE_BYTES))
        if header is None:
            _replace(path, _Header(series=secrets.token_hex(8), first=0), lines)
        elif size >= max_bytes:
            stream.seek(0)
            passed = sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 18), b"")) - 1
            older = _older(path)
            older.unlink(missing_ok=True)
            # A link, so that another writer finds this file or the next one.
            os.link(path, older)
            _replace(path, _Header(series=header.series, first=header.first + passed), lines)
        else:
            # What a writer that was killed has left of a line counts as one, and is passed over.
            is_whole = os.pread(fd, 1, size - 1) == b"\n"
            stream.seek(size)
            stream.write((b"" if is_whole else b"\n") + lines)


def _replace(path: Path, header: _Header, lines: bytes) -> None:
    """Replace a file by the next, under the lock on the former."""
    data = msgspec.json.encode(header) + b"\n" + lines
    Disk().replace_file(path, data, mode=0o644, durable=False)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _encode(span: Span) -> bytes:
    line = msgspec.json.encode(span) + b"\n"
    if len(line) > _MAX_LINE_BYTES:
        # Texts of any length are in the attributes and the error alone.
        line = (
            msgspec.json.encode(msgspec.structs.replace(span, attributes={}, error=span.error[:1000])) + b"\n"
        )
    return line


def read_spans(path: Path, position: SpoolPosition, most: int) -> SpoolPart:
    """Return the next spans of a spool; none where it does not exist.

    Args:
        path: the spool.
        position: where to begin.
        most: limit on the number of spans.
    """
    # The newer first: should it be set aside meanwhile, it is read twice and nothing is missed.
    newer, older = _content(path), _content(_older(path))
    headers = [_header(newer), _header(older)]
    spans: list[Span] = []
    missed = 0
    for content, header in ((older, headers[1]), (newer, headers[0])):
        if header is None or len(spans) >= most:
            continue
        if header.series != (headers[0] or header).series:
            # Left from before the spool was begun anew.
            continue
        if header.series != position.series:
            position = SpoolPosition(header.series, header.first)
        missed += max(0, header.first - position.number)
        number = max(position.number, header.first)
        # What follows the last line end is still being written.
        for line in content.split(b"\n")[1 + number - header.first : -1]:
            if len(spans) >= most:
                break
            number += 1
            span = decode_span(line)
            if span is None:
                missed += 1
            else:
                spans.append(span)
        position = SpoolPosition(header.series, number)
    return SpoolPart(spans, position, missed)


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, 4 * MAX_BYTES)
    except OSError:
        return b""


def _header(content: bytes) -> _Header | None:
    line, end, _ = content.partition(b"\n")
    try:
        return decode_json(line, _Header) if end else None
    except msgspec.DecodeError:
        return None


def decode_span(line: bytes) -> Span | None:
    """Return the span in a line; None if it has none."""
    try:
        span = decode_json(line, Span) if len(line) <= _MAX_LINE_BYTES else None
    except msgspec.DecodeError:
        return None
    return None if span is None or span.end_ns < span.start_ns else span
