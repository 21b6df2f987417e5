"""Spans of snapshots in the daemon: cut, capture and commit, into the spool of the exporter.

Guarantees: nothing is written unless `exporter.otlp` is configured; no failure of it costs a snapshot. The spans of a snapshot are
written together, when it is committed or has failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import structlog
import trio

from ciuic.protocol.span_spool import Attribute, Span, SpanName, append_spans, shown_roots
from ciuic.repository.config import read_config

log = structlog.get_logger(__name__)


class SnapshotCourse(NamedTuple):
    """Course of a snapshot from its cut to its end, by the wall clock."""

    snapshot: str
    roots: Sequence[str]
    cut_ns: int
    hold_microseconds: int
    capture_ns: int | None
    """Start of the last attempt; None: there was none."""
    commit_ns: int | None
    """Start of the commit; None: there was none, or it is not known."""
    end_ns: int
    error: str = ""
    """Why it failed; empty: it is committed."""
    figures: Mapping[str, Attribute] = MappingProxyType({})
    """Attributes of the capture."""


def spans_of(repository: str, course: SnapshotCourse) -> list[Span]:
    """Return the spans, in order of time and each within its parent, also where the wall clock was set meanwhile."""
    # The clock is asked again and again on the way from the cut to the commit.
    cut_end_ns = course.cut_ns + course.hold_microseconds * 1000
    outcome = "failed" if course.error else "committed"
    common: dict[str, Attribute] = {"ciuic.snapshot.outcome": outcome}

    def span(name: SpanName, start_ns: int, end_ns: int, attributes: Mapping[str, Attribute]) -> Span:
        return Span(
            name=name,
            repository=repository,
            snapshot=course.snapshot,
            start_ns=start_ns,
            end_ns=end_ns,
            error="" if name == "cut" else course.error,
            attributes={**common, **attributes},
        )

    cut: dict[str, Attribute] = {
        "ciuic.snapshot.roots": shown_roots(course.roots),
        "ciuic.cut.hold_ms": course.hold_microseconds / 1000,
    }
    spans = [span("cut", course.cut_ns, cut_end_ns, cut)]
    if course.capture_ns is not None:
        start_ns = max(cut_end_ns, course.capture_ns)
        end_ns = max(start_ns, course.end_ns)
        spans.append(span("capture", start_ns, end_ns, course.figures))
        if course.commit_ns is not None:
            spans.append(span("commit", min(max(start_ns, course.commit_ns), end_ns), end_ns, {}))
    return spans


class SpanWriter:
    """Writer of the daemon's spool."""

    def __init__(
        self, path: Path, is_wanted: Callable[[], bool], repository: Callable[[], Path | None]
    ) -> None:
        self._path = path
        self._is_wanted = is_wanted
        self._repository = repository
        self._is_failing = False

    async def write(self, course: SnapshotCourse) -> None:
        """Write the spans of a snapshot, if an exporter sends them."""
        if not self._is_wanted():
            return
        try:
            await trio.to_thread.run_sync(self._append, self._repository(), course)
            self._is_failing = False
        except Exception:  # nothing of the spans may cost a snapshot
            # Once, not with each snapshot.
            if not self._is_failing:
                log.exception("spans_not_written", path=str(self._path))
            self._is_failing = True

    def _append(self, repository: Path | None, course: SnapshotCourse) -> None:
        if repository is not None:
            append_spans(self._path, spans_of(read_config(os.fspath(repository)).id, course))
