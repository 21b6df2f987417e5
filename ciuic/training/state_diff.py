"""`StateDiff`: how the tensors of two saved states differ, as a sequence that prints as a table.

Guarantees: opening a state reads its documents alone. A tensor whose files are equal is not read, not even its header. Of
others the blocks that differ are read on both sides, and identical blocks once and only for figures of the whole tensor, or
not at all. The spans that are compared cover the tensors in order and once; what two blocks with one id hold is in no span
that is to be compared, except for an element that reaches into a block that differs. Memory: a few spans of 4 MiB, or a few
rows of a tensor that is cut differently.

Whatever a document or header claims was checked: a tensor is made of ranges inside of its files that cover it exactly once.
A cell of a table is one line of printable characters, whatever a repository contains, so that no name can drive a terminal;
in HTML every cell is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from math import prod
from typing import Final, Literal, NamedTuple, overload

from ciuic.errors import NotFound
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import find
from ciuic.training.change_figures import Array, ChangeFigures, FigureSums, numpy
from ciuic.training.stored_tensors import (
    BlockReader,
    FileRange,
    SavedState,
    StoredTensor,
    TensorSource,
    holds_state,
)
from ciuic.training.tensor_files import FileTensors
from ciuic.types import SnapshotId
from ciuic.units import human_size, plural

MAX_ROWS: Final = 60
"""Rows that are shown; a table of all snapshots of a long run would fill a notebook."""
_MAX_CELL: Final = 60

Row = Sequence[str]


def aligned_text(headers: Row, rows: Sequence[Row], numeric: Collection[str], rest: str) -> str:
    """Return a table of columns with two spaces between them.

    Args:
        headers: Headers of the columns.
        rows: Cells by row.
        numeric: Headers of the columns that are aligned to the right.
        rest: What the rows are that are left out after `MAX_ROWS`, for example ``earlier``.
    """
    lines = [list(headers), *(_cells(row) for row in rows[:MAX_ROWS])]
    widths = [max(len(line[at]) for line in lines) for at in range(len(headers))]
    text = [
        "  ".join(
            cell.rjust(width) if header in numeric else cell.ljust(width)
            for cell, width, header in zip(line, widths, headers, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([*text, *_left_out(rows, rest)])


def html_table(headers: Row, rows: Sequence[Row], numeric: Collection[str], rest: str) -> str:
    """Return the same as `aligned_text`, as an HTML table for notebooks."""

    def line(kind: str, cells: Row) -> str:
        styled = (
            f"<{kind}{_RIGHT if header in numeric else _LEFT}>{html.escape(cell)}</{kind}>"
            for cell, header in zip(cells, headers, strict=True)
        )
        return f"<tr>{''.join(styled)}</tr>"

    body = "".join(line("td", _cells(row)) for row in rows[:MAX_ROWS])
    after = "".join(f"<p>{html.escape(text)}</p>" for text in _left_out(rows, rest))
    return f"<table><thead>{line('th', headers)}</thead><tbody>{body}</tbody></table>{after}"


_RIGHT: Final = ' style="text-align:right"'
_LEFT: Final = ' style="text-align:left"'


def _cells(row: Row) -> list[str]:
    cells = [one_line(cell) for cell in row]
    return [cell if len(cell) <= _MAX_CELL else f"{cell[: _MAX_CELL - 1]}…" for cell in cells]


def _left_out(rows: Sequence[Row], rest: str) -> list[str]:
    return [f"… and {len(rows) - MAX_ROWS} {rest}"] if len(rows) > MAX_ROWS else []


_TensorChangeKind = Literal["changed", "retyped", "reshaped", "added", "removed"]


class TensorChange(NamedTuple):
    """A tensor that differs."""

    name: str
    """Object and name, for example ``model.layer.weight``."""
    kind: _TensorChangeKind
    """``retyped``: another dtype, with figures of the numbers; ``reshaped``: another shape, without figures."""
    old_dtype: str | None
    new_dtype: str | None
    """Names in safetensors, or the framework's own; None where there is no such tensor."""
    old_shape: tuple[int, ...] | None
    new_shape: tuple[int, ...] | None
    figures: ChangeFigures | None = None
    """Figures of the change; None unless the tensor is changed or retyped."""


HEADERS: Final = ("tensor", "change", "largest", "cosine", "nan", "inf")
_NUMERIC: Final = HEADERS[1:]


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
        return f"{aligned_text(HEADERS, list(map(row, self)), _NUMERIC, 'more')}\n{self.summary()}"

    def _repr_html_(self) -> str:
        """Return the table for a notebook; everything from the repository is escaped."""
        table = html_table(HEADERS, list(map(row, self)), _NUMERIC, "more") if self._changes else ""
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
    repository: Repository,
    old: SnapshotId,
    new: SnapshotId,
    *,
    below: bytes = b"",
    old_below: bytes | None = None,
    whole: bool = True,
) -> StateDiff:
    """Compare the tensors of two states that `SnapshotManager` saved, or of a file or directory in two snapshots of a daemon.

    Args:
        repository: Repository of both snapshots.
        old: Snapshot before.
        new: Snapshot after.
        below: Only tensors with a file at or below this path of the snapshots; empty: all, of states.
        old_below: This path in the snapshot before; None for the same, as of a checkpoint that keeps its name.
        whole: Whether to read identical blocks of tensors that differ elsewhere, once, for the norm, cosine
            and counts of all of the tensor.

    Raises:
        NotFound: There is no such snapshot, one holds no training state, or neither has ``below``.
        NotTensors: There are no tensors that are known here in a file or directory.
        Damaged: Something cannot be read, or is not as it should be.
        CiuicError: NumPy is not installed.
    """
    reader = BlockReader(repository)
    before = _source(repository, old, reader, below if old_below is None else old_below)
    after = _source(repository, new, reader, below)
    if below and not any(True for state in (before, after) for _ in state.names()):
        raise NotFound(
            f"neither {old} nor {new} has a tensor at or below {below.decode('utf-8', 'backslashreplace')}"
        )
    changes: list[TensorChange] = []
    identical = 0
    for change in _tensor_changes(before, after, reader, whole=whole):
        if change is None:
            identical += 1
        else:
            changes.append(change)
    size_bytes = before.size_bytes + after.size_bytes
    return StateDiff(old, new, changes, identical, reader.read_bytes, size_bytes)


def _source(repository: Repository, id_: SnapshotId, reader: BlockReader, below: bytes) -> TensorSource:
    snapshot = repository.snapshots.load(id_)
    if not below or holds_state(repository, snapshot):
        return SavedState(repository, id_, reader, below)
    at = find(repository, snapshot, below)
    return FileTensors(repository, at.entry, at.path, reader)


_ROWS_BYTES: Final = 4 << 20


def _tensor_changes(
    old: TensorSource, new: TensorSource, reader: BlockReader, *, whole: bool
) -> Iterator[TensorChange | None]:
    """Yield the change of each tensor of either side; None for one that is identical.

    Args:
        old: Tensors before.
        new: Tensors after.
        reader: Reads both.
        whole: Whether to read identical blocks of tensors that differ elsewhere, for the figures of all of
            the tensor.

    Raises:
        Damaged: A tensor cannot be read.
    """
    before, after = set(old.names()), set(new.names())
    for name in old.names():
        if name not in after:
            gone = old.tensor(name)
            yield TensorChange(name, "removed", gone.kind.name, None, gone.shape, None)
    compared: dict[Hashable, TensorChange | None] = {}
    for name in new.names():
        if name not in before:
            come = new.tensor(name)
            yield TensorChange(name, "added", None, come.kind.name, None, come.shape)
            continue
        pair = old.identity(name), new.identity(name)
        # Tied tensors are read once.
        if pair[0] != pair[1] and pair not in compared:
            compared[pair] = tensor_change(name, old.tensor(name), new.tensor(name), reader, whole=whole)
        change = compared.get(pair)
        yield None if change is None else change._replace(name=name)


def tensor_change(
    name: str, old: StoredTensor, new: StoredTensor, reader: BlockReader, *, whole: bool
) -> TensorChange | None:
    """Return the change of one tensor; None if its numbers are the same.

    Args:
        name: What the change calls it.
        old: The tensor before.
        new: The tensor after.
        reader: Reads both.
        whole: As of `diff_states`.

    Raises:
        Damaged: A block cannot be read.
    """
    facts = old.kind.name, new.kind.name, old.shape, new.shape
    if old.shape != new.shape:
        return TensorChange(name, "reshaped", *facts)
    sums = FigureSums(old.kind, new.kind)
    if old.kind.name != new.kind.name:
        if old.kind.read is not None and new.kind.read is not None:
            for before, after in _recut(old, new, reader):
                sums.add(before, after)
        return TensorChange(name, "retyped", *facts, sums.result(prod(new.shape)))
    if [(one.offsets, one.shape) for one in old.ranges] == [(one.offsets, one.shape) for one in new.ranges]:
        _add_ranges(sums, old, new, reader, whole=whole)
    else:
        for before, after in _recut(old, new, reader):
            sums.add(before, after)
    return TensorChange(name, "changed", *facts, sums.result(prod(new.shape))) if sums.changed else None


def _add_ranges(
    sums: FigureSums, old: StoredTensor, new: StoredTensor, reader: BlockReader, *, whole: bool
) -> None:
    """Add a tensor of one dtype that is cut in the same way on both sides."""
    known: list[tuple[FileRange, Span]] = []
    for before, after in zip(old.ranges, new.ranges, strict=True):
        if before.size_bytes != after.size_bytes:
            # Only of a dtype that is unknown here, whose shape does not tell the bytes.
            sums.changed += 1
            continue
        for span in spans(reader, before, after, old.kind.element_bytes):
            if span.same:
                known.append((after, span))
                continue
            one, other = ((side, span.start, span.stop) for side in (before, after))
            sums.add(_bytes(reader, *one), _bytes(reader, *other))
    # Only now: nothing of a tensor that turns out to be the same is read for its norm.
    if sums.changed and whole and new.kind.read is not None:
        for after, span in known:
            sums.add_identical(_bytes(reader, after, span.start, span.stop))
    elif known:
        sums.leave_out()


def _bytes(reader: BlockReader, where: FileRange, start: int, stop: int) -> Array:
    data = reader.read(where.entry, where.start + start, where.start + stop)
    return numpy().frombuffer(data, numpy().uint8)


def _recut(old: StoredTensor, new: StoredTensor, reader: BlockReader) -> Iterator[tuple[Array, Array]]:
    """Yield the bytes of both tensors for each block that two of their ranges have in common."""
    for after in new.ranges:
        for before in old.ranges:
            low = [max(pair) for pair in zip(before.offsets, after.offsets, strict=True)]
            high = [min(pair) for pair in zip(_ends(before), _ends(after), strict=True)]
            if any(start >= stop for start, stop in zip(low, high, strict=True)):
                continue
            row_bytes = max(
                prod(one.shape[1:]) * tensor.kind.element_bytes
                for one, tensor in ((before, old), (after, new))
            )
            rows = max(1, _ROWS_BYTES // max(1, row_bytes))
            # A tensor without a dimension is one row.
            first, stop = (low[0], high[0]) if low else (0, 1)
            for at in range(first, stop, rows):
                upto = min(stop, at + rows)
                yield (
                    _rows(reader, before, old.kind.element_bytes, at, upto, low, high),
                    _rows(reader, after, new.kind.element_bytes, at, upto, low, high),
                )


def _ends(one: FileRange) -> list[int]:
    return [offset + size for offset, size in zip(one.offsets, one.shape, strict=True)]


def _rows(
    reader: BlockReader,
    one: FileRange,
    element_bytes: int,
    at: int,
    upto: int,
    low: list[int],
    high: list[int],
) -> Array:
    """Return rows of the whole tensor from one range, cut to a block in the other dimensions."""
    if not one.shape:
        return _bytes(reader, one, 0, element_bytes)
    row_bytes = prod(one.shape[1:]) * element_bytes
    begin = at - one.offsets[0]
    data = _bytes(reader, one, begin * row_bytes, (begin + upto - at) * row_bytes)
    others = zip(low[1:], high[1:], one.offsets[1:], strict=True)
    cut = (slice(None), *(slice(start - offset, stop - offset) for start, stop, offset in others))
    block = data.reshape(upto - at, *one.shape[1:], element_bytes)[cut]
    return numpy().ascontiguousarray(block).reshape(-1)


_SPAN_BYTES: Final = 4 << 20
# Blocks whose ids are looked up at once: those of one node of a block map.
_WINDOW: Final = 1024


class Span(NamedTuple):
    """Range of bytes of both tensors, in whole elements."""

    start: int
    stop: int
    same: bool
    """True if the bytes are known to be the same on both sides."""


def spans(reader: BlockReader, old: FileRange, new: FileRange, element_bytes: int) -> Iterator[Span]:
    """Yield the spans of two ranges of the same size and dtype, of at most about 4 MiB or one block each."""
    begin = 0
    for found in _merged(_block_spans(reader, old, new), max(_SPAN_BYTES, reader.block_size)):
        # An element that reaches into a block that differs belongs to the span that is compared.
        elements = found.stop // element_bytes if found.same else -(-found.stop // element_bytes)
        stop = min(elements * element_bytes, new.size_bytes)
        if begin < stop:
            yield Span(begin, stop, found.same)
            begin = stop


def _block_spans(reader: BlockReader, old: FileRange, new: FileRange) -> Iterator[Span]:
    """Yield a span for each block of the new file."""
    block, size = reader.block_size, new.size_bytes
    first, stop = new.start // block, -(-(new.start + size) // block)
    shift, unaligned = divmod(old.start - new.start, block)
    for window in range(first, stop, _WINDOW):
        end = min(window + _WINDOW, stop)
        # Where the two stand differently in their blocks, ids tell nothing.
        known = not unaligned
        ids = reader.ids(new.entry, window, end) if known else {}
        before = reader.ids(old.entry, max(0, window + shift), end + shift) if known else {}
        for at in range(window, end):
            start = max(0, at * block - new.start)
            upto = min(size, (at + 1) * block - new.start)
            yield Span(start, upto, same=known and ids.get(at) == before.get(at + shift))


def _merged(found: Iterator[Span], most_bytes: int) -> Iterator[Span]:
    """Join neighbours that are alike, up to a size."""
    last: Span | None = None
    for span in found:
        if last is not None and last.same == span.same and span.stop - last.start <= most_bytes:
            last = last._replace(stop=span.stop)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
