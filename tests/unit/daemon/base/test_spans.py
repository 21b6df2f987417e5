"""Tests of the daemon's spans: each lies within its parent, whatever the clock did, and a failure is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ciuic.daemon.base.spans import SnapshotCourse, SpanWriter, spans_of
from ciuic.protocol.span_spool import SPANS_NAME, SpoolPosition, read_spans
from ciuic.repository import Repository

COURSE = SnapshotCourse(
    snapshot="cs-a", roots=["/a"], cut_ns=1_000_000, hold_microseconds=500, capture_ns=2_000_000,
    commit_ns=3_000_000, end_ns=4_000_000,
)  # fmt: skip


@pytest.mark.parametrize("end_ns", [4_000_000, 2_500_000, 10])
def test_spans_are_nested_whatever_the_clock_says(end_ns: int) -> None:
    """The commit lies within the capture, which follows the cut, also if the clock was set back meanwhile."""
    cut, capture, commit = spans_of("0f", COURSE._replace(end_ns=end_ns))
    assert (cut.name, capture.name, commit.name) == ("cut", "capture", "commit")
    assert cut.end_ns - cut.start_ns == 500_000
    assert cut.end_ns <= capture.start_ns <= commit.start_ns <= commit.end_ns == capture.end_ns


def test_a_snapshot_that_failed_has_its_reason() -> None:
    """The capture has the error, the cut does not, and one that never began has no span."""
    cut, capture = spans_of("0f", COURSE._replace(commit_ns=None, error="no space"))
    assert (cut.error, capture.error) == ("", "no space")
    assert capture.attributes["ciuic.snapshot.outcome"] == "failed"
    (only,) = spans_of("0f", COURSE._replace(capture_ns=None, commit_ns=None, error="no space"))
    assert (only.name, only.attributes["ciuic.snapshot.outcome"]) == ("cut", "failed")


@pytest.mark.parametrize("wanted", [True, False])
def test_spans_are_written_only_for_an_exporter(tmp_path: Path, wanted: bool) -> None:
    """Without `exporter.otlp` there is no file; a repository that is gone costs nothing but the spans."""
    place, spool = tmp_path / "repository", tmp_path / SPANS_NAME
    with Repository.create(place) as repository:
        id_ = repository.id
    trio.run(SpanWriter(spool, lambda: wanted, lambda: place).write, COURSE)
    trio.run(SpanWriter(spool, lambda: wanted, lambda: tmp_path / "gone").write, COURSE)
    assert spool.exists() == wanted
    assert {one.repository for one in read_spans(spool, SpoolPosition(), 9).spans} == (
        {id_} if wanted else set()
    )
