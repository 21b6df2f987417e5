"""`StateDiff`: how the tensors of two saved states differ, as a sequence that prints as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, overload

from ciuic.errors import NotFound
from ciuic.repository import Repository
from ciuic.training.compare.stored_tensors import BlockReader, SavedState
from ciuic.training.compare.tensor_changes import TensorChange, tensor_changes
from ciuic.training.compare.text_table import aligned_text, html_table
from ciuic.types import SnapshotId
from ciuic.units import human_size, plural

HEADERS: Final = ("tensor", "change", "largest", "cosine", "nan", "inf")
NUMERIC: Final = HEADERS[1:]


class StateDiff(Sequence[TensorChange]):
    """Tensors of two states that differ: those without figures first, then those with new NaN or infinities, then the others.

    Each by relative change, largest first, and where that is not known last, by the norm of the change.
    """

    def __init__(
        self,
        old: str,
        new: str,
        changes: Iterable[TensorChange],
        identical: int,
        read_bytes: int,
        size_bytes: int,
    ) -> None:
        """Order the changes; the other arguments are the attributes of these names."""
        self.old = old
        """Id of the snapshot before."""
        self.new = new
        """Id of the snapshot after."""
        self.identical = identical
        """Number of tensors that are the same."""
        self.read_bytes = read_bytes
        """Bytes of blocks that were read and checked for this, without documents."""
        self.size_bytes = size_bytes
        """Size of both states."""
        self._changes = sorted(changes, key=_order)

    def __len__(self) -> int:
        return len(self._changes)

    @overload
    def __getitem__(self, at: int) -> TensorChange: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[TensorChange]: ...

    def __getitem__(self, at: int | slice) -> TensorChange | Sequence[TensorChange]:
        return self._changes[at]

    def summary(self) -> str:
        """Return how many tensors differ, and what was read, in one line."""
        return (
            f"{plural(len(self), 'tensor')} of {len(self) + self.identical} "
            f"{'differs' if len(self) == 1 else 'differ'}; "
            f"read {human_size(self.read_bytes)} of {human_size(self.size_bytes)}"
        )

    def __repr__(self) -> str:
        if not self._changes:
            return self.summary()
        return f"{aligned_text(HEADERS, list(map(row, self)), NUMERIC, 'more')}\n{self.summary()}"

    def _repr_html_(self) -> str:
        """Return the table for a notebook; everything from the repository is escaped."""
        table = html_table(HEADERS, list(map(row, self)), NUMERIC, "more") if self._changes else ""
        return f"{table}<p>{self.summary()}</p>"


def row(change: TensorChange) -> list[str]:
    """Return the cells of a change in a table, which fits into 60 columns with 24 for the name."""
    figures = change.figures
    if figures is None or figures.change_norm is None:
        return [change.name, _LABELS.get(change.kind, change.kind), "", "", "", ""]
    cosine = figures.cosine
    return [
        change.name,
        _number(figures.relative_change),
        _number(figures.largest_change),
        "" if cosine is None else f"{cosine:.{4 if cosine >= 0 else 3}f}",
        _count(figures.new_nan),
        _count(figures.new_inf),
    ]


_LABELS: Final = {"reshaped": "shape", "retyped": "dtype"}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _count(number: int) -> str:
    """Return a count in three characters: 950, 12k, .3M."""
    if not number:
        return ""
    for unit, above in zip(("", "k", "M", "G"), ("k", "M", "G", "T"), strict=True):
        if number < (1000 if not unit else 100):
            return f"{number}{unit}"
        if unit and number < 1000:
            return f".{number // 100}{above}"
        number //= 1000
    return "…"


def _order(change: TensorChange) -> tuple[int, float, str]:
    figures = change.figures
    if figures is None or figures.change_norm is None:
        return 0, 0.0, change.name
    # A number that is none any more spoils a training, however little else has changed.
    spoilt = figures.new_nan > figures.old_nan or figures.new_inf > figures.old_inf
    if figures.relative_change is None:
        return 1 if spoilt else 3, -figures.change_norm, change.name
    return 1 if spoilt else 2, -figures.relative_change, change.name


def diff_states(
    repository: Repository, old: SnapshotId, new: SnapshotId, *, below: bytes = b"", whole: bool = True
) -> StateDiff:
    """Compare the tensors of two states that `SnapshotManager` saved.

    Args:
        repository: Repository of both snapshots.
        old: Snapshot before.
        new: Snapshot after.
        below: Only tensors with a file at or below this path of the snapshots; empty: all.
        whole: Whether to read identical blocks of tensors that differ elsewhere, once, for the norm, cosine
            and counts of all of the tensor.

    Raises:
        NotFound: There is no such snapshot, one holds no training state, or neither has ``below``.
        Damaged: Something cannot be read, or is not as it should be.
        CiuicError: NumPy is not installed.
    """
    reader = BlockReader(repository)
    before, after = (SavedState(repository, id_, reader, below) for id_ in (old, new))
    if below and not any(True for state in (before, after) for _ in state.names()):
        raise NotFound(
            f"neither {old} nor {new} has a tensor at or below {below.decode('utf-8', 'backslashreplace')}"
        )
    changes: list[TensorChange] = []
    identical = 0
    for change in tensor_changes(before, after, reader, whole=whole):
        if change is None:
            identical += 1
        else:
            changes.append(change)
    size_bytes = before.size_bytes + after.size_bytes
    return StateDiff(old, new, changes, identical, reader.read_bytes, size_bytes)
