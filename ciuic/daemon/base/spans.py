"""A span of each snapshot, into the spool of the exporter.

Guarantees: nothing is written unless `exporter.otlp` is configured; no failure of it costs a snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog
import trio

from ciuic.protocol.span_spool import Attribute, Span, append_spans
from ciuic.repository.config import read_config

log = structlog.get_logger(__name__)


class SnapshotCourse(NamedTuple):
    """Course of a snapshot from its cut to its end, by the wall clock."""

    snapshot: str
    cut_ns: int
    end_ns: int
    figures: Mapping[str, Attribute]
    error: str = ""
    """Why it failed; empty: it is committed."""


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
        """Write the span of a snapshot, if an exporter sends it."""
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
            span = Span(
                repository=read_config(os.fspath(repository)).id,
                snapshot=course.snapshot,
                start_ns=course.cut_ns,
                # The clock may have been set back meanwhile.
                end_ns=max(course.cut_ns, course.end_ns),
                error=course.error,
                attributes={
                    "ciuic.snapshot.outcome": "failed" if course.error else "committed",
                    **course.figures,
                },
            )
            append_spans(self._path, [span])
