"""Tests of the daemon's spans: one for a snapshot, whatever the clock did, and only where an exporter sends it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ciuic.daemon.base.metrics import SnapshotCourse, SpanWriter
from ciuic.protocol.span_spool import SPANS_NAME, SpoolPosition, read_spans
from ciuic.repository import Repository


@pytest.mark.parametrize("is_wanted", [True, False])
def test_spans_are_written_only_for_an_exporter(tmp_path: Path, is_wanted: bool) -> None:
    """Without `exporter.otlp` there is no file; a span ends at its start or later, has the reason of a failure, and costs no snapshot."""
    place, spool = tmp_path / "repository", tmp_path / SPANS_NAME
    with Repository.create(place) as repository:
        id_ = repository.id
    for end_ns, error in ((4_000_000, ""), (10, "no space")):
        course = SnapshotCourse("cs-a", 1_000_000, end_ns, {"ciuic.snapshot.files": 1}, error)
        trio.run(SpanWriter(spool, lambda: is_wanted, lambda: place).write, course)
        trio.run(SpanWriter(spool, lambda: is_wanted, lambda: tmp_path / "gone").write, course)
    assert spool.exists() == is_wanted
    found = [
        (one.repository, one.start_ns, one.end_ns, one.error, one.attributes["ciuic.snapshot.outcome"])
        for one in read_spans(spool, SpoolPosition(), 9).spans
    ]
    written = [
        (id_, 1_000_000, 4_000_000, "", "committed"),
        (id_, 1_000_000, 1_000_000, "no space", "failed"),
    ]
    assert found == (written if is_wanted else [])
