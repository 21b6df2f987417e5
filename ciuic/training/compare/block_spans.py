"""Spans of two tensors that have to be compared, from the ids of the blocks that hold them.

Guarantees: the spans cover the tensors in order and once. What two blocks with one id hold is in no span that
is to be compared, except for an element that reaches into a block that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ciuic.training.compare.stored_tensors import BlockReader, FileRange

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
