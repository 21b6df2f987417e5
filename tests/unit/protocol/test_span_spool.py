"""Tests of the spools of spans: what a reader sees while a writer goes on, and what it is told to have missed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ciuic.protocol.span_spool import (
    SPANS_NAME,
    Span,
    SpoolPosition,
    append_spans,
    read_spans,
    span_id,
    trace_id,
)

START = SpoolPosition()


def span(number: int) -> Span:
    return Span(repository="0f", snapshot=f"s{number}", start_ns=number, end_ns=number + 1)


def names(spans: list[Span]) -> list[str]:
    return [one.snapshot for one in spans]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / SPANS_NAME


def test_ids_are_those_of_the_snapshot() -> None:
    """They depend on the repository and the snapshot alone: a span that is sent again is known."""
    one, again, other = (
        Span(repository=of, snapshot="a", start_ns=1, end_ns=end)
        for of, end in (("0f", 2), ("0f", 3), ("0e", 2))
    )
    assert span_id(one) == span_id(again) != span_id(other)
    assert trace_id("0f", "a") != trace_id("0e", "a")


def test_a_reader_gets_every_span_once(path: Path) -> None:
    """Reading in parts and going on from the position gives each span once, in order, over files that were set aside."""
    position, seen, missed = START, [], 0
    for number in range(60):
        append_spans(path, [span(2 * number), span(2 * number + 1)], max_bytes=1500)
        if number % 5 == 4:
            while (part := read_spans(path, position, 3)).position != position:
                position = part.position
                seen += names(part.spans)
                missed += part.missed
    assert seen == [f"s{number}" for number in range(120)]
    assert missed == 0
    assert sorted(os.listdir(path.parent)) == [SPANS_NAME, f"{SPANS_NAME}.1"]
    assert all(one.stat().st_size < 2000 for one in path.parent.iterdir())
    assert all(one.stat().st_mode & 0o777 == 0o644 for one in path.parent.iterdir())


def test_a_reader_knows_what_it_missed(path: Path) -> None:
    """Spans that were thrown away before they were read are counted, and so is a line that is none."""
    append_spans(path, [span(0)])
    position = read_spans(path, START, 9).position
    for number in range(1, 100):
        append_spans(path, [span(number)], max_bytes=1000)
    with open(path, "ab") as stream:
        # As a writer leaves it that is killed.
        stream.write(b'{"snapshot": "cu')
    append_spans(path, [span(100)])
    part = read_spans(path, position, 1000)
    assert names(part.spans)[-2:] == ["s99", "s100"]
    assert len(part.spans) + part.missed == 101
    assert part.missed > 50


def test_a_line_that_is_being_written_is_not_read(path: Path) -> None:
    """A line without its end is left for later."""
    append_spans(path, [span(0)])
    whole = path.read_bytes()
    append_spans(path, [span(1)])
    path.write_bytes(path.read_bytes()[: len(whole) + 5])
    assert names(read_spans(path, START, 9).spans) == ["s0"]


@pytest.mark.parametrize("how", ["removed", "empty", "foreign"])
def test_a_spool_that_is_begun_anew_is_read_from_its_start(path: Path, how: str) -> None:
    """After a reboot, or damage, a new numbering begins; what is left of the old one is not sent again."""
    for number in range(30):
        append_spans(path, [span(number)], max_bytes=1000)
    position = read_spans(path, START, 100).position
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else b"other\n")
    append_spans(path, [span(77)])
    part = read_spans(path, position, 100)
    assert (names(part.spans), part.missed) == (["s77"], 0)
    assert read_spans(path, part.position, 100).spans == []


def test_several_writers_lose_nothing(path: Path) -> None:
    """Threads that append at the same time, over files that are set aside, tear no line and lose no span uncounted."""
    # A reader that comes late has missed what was before it, and does not know.
    append_spans(path, [span(1)])
    position, seen = read_spans(path, START, 1).position, []

    def write(first: int) -> None:
        for number in range(first, first + 100):
            append_spans(path, [span(number)], max_bytes=4000)

    writers = [threading.Thread(target=write, args=(1000 * number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    missed, alive = 0, True
    while alive:
        alive = any(writer.is_alive() for writer in writers)
        part = read_spans(path, position, 1000)
        position, missed = part.position, missed + part.missed
        seen += names(part.spans)
    assert len(seen) == len(set(seen))
    assert len(seen) + missed == 300


def test_a_spool_that_is_no_file_is_left_alone(path: Path) -> None:
    """A symbolic link is neither read nor written through."""
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        append_spans(path, [span(0)])
    assert read_spans(path, START, 9).spans == []
    assert not (path.parent / "elsewhere").exists()


def test_a_long_span_is_written_without_its_texts(path: Path) -> None:
    """Texts beyond the limit of a line are left out, and the span stays."""
    long = Span(repository="0f", snapshot="a", start_ns=1, end_ns=2, error="x" * 100_000)
    append_spans(path, [long])
    (read,) = read_spans(path, START, 9).spans
    assert (read.snapshot, read.error) == ("a", "x" * 1000)
