"""Capture of the roots of one snapshot, one after the other.

Guarantees: a root that cannot be captured is left out, with the reason, and the others are captured. An
error of the repository, which all of them need, ends the capture. Nothing here commits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import traceback
from typing import NamedTuple

import structlog

from ciuic.daemon.capture.job import CaptureJob, printable
from ciuic.daemon.capture.root import Interrupted, Report, RootUnreadable, capture_root
from ciuic.daemon.capture.space import NoRoom
from ciuic.errors import CiuicError
from ciuic.repository import Repository, Writer
from ciuic.types import LeftOut, RootRecord

_log = structlog.get_logger(__name__)


class Captured(NamedTuple):
    """Outcome for all roots."""

    records: tuple[RootRecord, ...]
    left_out: tuple[LeftOut, ...]
    incomplete: tuple[bytes, ...]
    """Roots with unreadable entries."""
    parent: str
    """Id of the snapshot that the first root builds on; empty for none."""


def capture_roots(job: CaptureJob, repository: Repository, writer: Writer, report: Report) -> Captured:
    """Read every root that can be read.

    Raises what the first root failed with when none could be; Interrupted; OSError and CiuicError of the
    repository.
    """
    records: list[RootRecord] = []
    left_out = list(job.left_out)
    incomplete: list[bytes] = []
    parent = ""
    first_failure: Exception | None = None
    for root in job.roots:
        before = len(report.errors), report.errors_total
        try:
            record, builds_on = capture_root(root, repository, writer, report)
        except Exception as error:
            if not costs_one_root(error):
                raise
            _log_failure(root.path, error)
            report.root_failed(before)
            # The frames of the traceback hold the memory of the walk, which the next root needs.
            traceback.clear_frames(error.__traceback__)
            first_failure = first_failure or error.with_traceback(None)
            left_out.append(LeftOut(path=root.path, reason=reason_of(error)))
            # Frees reference cycles of the failed walk now, not at some later collection.
            gc.collect()
            continue
        records.append(record)
        parent = parent or builds_on
        if report.errors_total > before[1]:
            incomplete.append(root.path)
    if first_failure is not None and not records:
        report.root = job.roots[0].path
        raise first_failure
    return Captured(tuple(records), tuple(left_out), tuple(incomplete), parent)


def costs_one_root(error: Exception) -> bool:
    """Return whether an error concerns one root only, and neither the repository nor other roots.

    Such errors are those of the root itself, of its size, of its undo log and of the memory that its walk
    took. A defect in this program that one root brings out must not cost the other roots their snapshot
    either.
    """
    if isinstance(error, RootUnreadable | NoRoom):
        return True
    return not isinstance(error, Interrupted | CiuicError | OSError)


def reason_of(error: Exception) -> str:
    """Return why a root was left out, in one line for JSON."""
    if isinstance(error, CiuicError):
        return printable(error.message)
    if isinstance(error, MemoryError):
        return "the memory limit of a capture was reached while it was read"
    return printable(str(error) or type(error).__name__)


def _log_failure(path: bytes, error: Exception) -> None:
    known = isinstance(error, CiuicError) or type(error).__name__ in (
        "UndoLost",
        "UndoDamaged",
        "TrackingBroken",
    )
    _log.error("root_left_out", root=os.fsdecode(path), error=reason_of(error), exc_info=not known)


def limit_memory(limit_bytes: int) -> None:
    """Let allocations beyond the limit fail in this process.

    They fail as MemoryError, which costs the root that is read instead of the host's memory. Data of the
    kernel and shared mappings do not count (setrlimit(2), RLIMIT_DATA).
    """
    if limit_bytes:
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))
