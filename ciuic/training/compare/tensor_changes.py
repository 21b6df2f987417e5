"""Comparison of the tensors of two sources, one after the other.

Guarantees: a tensor whose files are equal is not read. Of others the blocks that differ are read on both
sides, and identical blocks once and only for figures of the whole tensor, or not at all. Memory: a few spans
of 4 MiB, or a few rows of a tensor that is cut differently.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import prod
from typing import Final, Literal, NamedTuple

from ciuic.training.compare.block_spans import Span, spans
from ciuic.training.compare.figures import ChangeFigures, FigureSums
from ciuic.training.compare.number_kinds import Array, numpy
from ciuic.training.compare.stored_tensors import BlockReader, FileRange, StoredTensor, TensorSource

_ROWS_BYTES: Final = 4 << 20

TensorChangeKind = Literal["changed", "retyped", "reshaped", "added", "removed"]


class TensorChange(NamedTuple):
    """A tensor that differs."""

    name: str
    """Object and name, for example ``model.layer.weight``."""
    kind: TensorChangeKind
    """``retyped``: another dtype, with figures of the numbers; ``reshaped``: another shape, without figures."""
    old_dtype: str | None
    new_dtype: str | None
    """Names in safetensors, or the framework's own; None where there is no such tensor."""
    old_shape: tuple[int, ...] | None
    new_shape: tuple[int, ...] | None
    figures: ChangeFigures | None = None
    """Figures of the change; None unless the tensor is changed or retyped."""


def tensor_changes(
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
            compared[pair] = _change(name, old.tensor(name), new.tensor(name), reader, whole=whole)
        change = compared.get(pair)
        yield None if change is None else change._replace(name=name)


def _change(
    name: str, old: StoredTensor, new: StoredTensor, reader: BlockReader, *, whole: bool
) -> TensorChange | None:
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
