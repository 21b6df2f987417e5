"""Comparison of two snapshots for a page: which paths differ, and how the contents of one path do.

Guarantees: not more than `MAX_CHANGES` paths, `MAX_TENSORS` tensors and the lines that `answers.text_difference` allows are returned; names are shown
as text by whoever shows them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from ciuic.cli.commands.pick import answers
from ciuic.cli.commands.web.jobs import CompareQuestion, Difference, TensorRow
from ciuic.cli.commands.web.reading import Reading
from ciuic.cli.shared.contents import as_recorded
from ciuic.compare.diff import PathChange, diff_snapshots
from ciuic.errors import NotFound
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import Located, find
from ciuic.types import Entry, Snapshot
from ciuic.verdicts.sources import SnapshotFile
from ciuic.verdicts.verdict import SUFFIXES

MAX_CHANGES: Final = 500
MAX_TENSORS: Final = 500


class Comparison(NamedTuple):
    """Two snapshots, older first as they were asked for, and what differs."""

    old: Snapshot
    new: Snapshot
    path: bytes
    """Path at and below which they are compared; empty for all."""
    old_path: bytes
    """The path in the older one."""
    changes: list[PathChange]
    has_more: bool
    before: Entry | None
    after: Entry | None
    """Entries of the path; None where it is not, and for all."""

    @property
    def has_other_name(self) -> bool:
        """True if the two are different paths, of which only the contents are compared."""
        return self.old_path != self.path

    @property
    def can_differ_inside(self) -> bool:
        """True if the contents of the path are to be compared: a file on both sides, or directories, which may hold tensors."""
        if self.before is None or self.after is None or not (self.changes or self.has_other_name):
            return False
        return (self.before.is_file and self.after.is_file) or (self.before.is_dir and self.after.is_dir)


def compared(
    reading: Reading, old_text: str, new_text: str, path: bytes, old_path: bytes = b""
) -> Comparison:
    """Return which paths differ between two snapshots.

    Raises:
        NotFound: there is no such snapshot, or neither has the path.
    """
    old, new = reading.snapshot(old_text)[1], reading.snapshot(new_text)[1]
    repository = reading.session.repository_of(old.id, new.id)
    path = as_recorded(new, path) if path else b""
    old_path = as_recorded(old, old_path) if path and old_path else path
    before = _entry(repository, old, old_path) if path else None
    after = _entry(repository, new, path) if path else None
    if old_path != path:
        if before is None or after is None:
            lacking = (old, old_path) if before is None else (new, path)
            raise NotFound(f"{one_line(lacking[1])} is not in {lacking[0].id}")
        return Comparison(old, new, path, old_path, [], False, before, after)
    changes = list(itertools.islice(diff_snapshots(repository, old, new, path or None), MAX_CHANGES + 1))
    return Comparison(old, new, path, path, changes[:MAX_CHANGES], len(changes) > MAX_CHANGES, before, after)


def _entry(repository: Repository, snapshot: Snapshot, path: bytes) -> Entry | None:
    try:
        return find(repository, snapshot, path).entry
    except NotFound:
        return None


def contents_differ(reading: Reading, question: CompareQuestion) -> Difference:
    """Return how the contents of a path differ: of texts line by line, of checkpoints tensor by tensor.

    Raises:
        NotFound: one of the snapshots has no such path.
        NotTensors: it is neither text nor has it tensors that are known.
        Damaged: it cannot be read.
    """
    old, new = reading.snapshot(question.old)[1], reading.snapshot(question.new)[1]
    repository = reading.session.repository_of(old.id, new.id)
    path = as_recorded(new, unquote_to_bytes(question.path))
    old_path = as_recorded(old, unquote_to_bytes(question.old_path))
    found = [find(repository, old, old_path), find(repository, new, path)]
    if all(one.entry.is_file for one in found) and not path.endswith(SUFFIXES):
        before, after = (
            SnapshotFile(repository, snapshot, one, lambda time_ns: None)
            for snapshot, one in zip((old, new), found, strict=True)
        )
        lines = list(answers.text_difference(before, after))
        return Difference(kind="text", lines=tuple((line.style, line.text) for line in lines))
    return _tensors_differ(repository, old, new, *found)


def _tensors_differ(
    repository: Repository, old: Snapshot, new: Snapshot, before: Located, after: Located
) -> Difference:
    # Imported here: the front has no use for it.
    from ciuic.training.state_diff import TensorChange, diff_states

    diff = diff_states(repository, old.id, new.id, below=after.path, old_below=before.path)
    relative = [_finite(change.figures.relative_change) for change in diff if change.figures is not None]
    known = [value for value in relative if value is not None]
    median = statistics.median(known) if known else 0.0

    def row(change: TensorChange) -> TensorRow:
        shape = "x".join(map(str, change.new_shape or change.old_shape or ())) or "scalar"
        made = TensorRow(name=one_line(change.name), kind=change.kind, shape=shape)
        figures = change.figures
        if figures is None:
            return made
        value = _finite(figures.relative_change)
        return msgspec.structs.replace(
            made,
            relative=value,
            largest=_finite(figures.largest_change),
            cosine=_finite(figures.cosine),
            new_nan=figures.new_nan,
            new_inf=figures.new_inf,
            times_median=value / median if value is not None and median else None,
        )

    return Difference(
        kind="tensors",
        tensors=tuple(map(row, diff[:MAX_TENSORS])),
        differing=len(diff),
        identical=diff.identical,
        read_bytes=diff.read_bytes,
        size_bytes=diff.size_bytes,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
