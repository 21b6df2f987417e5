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
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, Literal, NamedTuple, overload

from ciuic.errors import Damaged, NotFound
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.training.change_figures import Array, ChangeFigures, FigureSums, NumberKind, number_kind, numpy
from ciuic.training.format.layout import SUFFIX, TensorInFile, read_header
from ciuic.training.format.reading import FACTS_FILE, STATE_FILE, STATE_VERSION
from ciuic.training.format.shards import is_whole, parse_piece, piece_sizes
from ciuic.training.format.stored_files import Files, read_file, top_of
from ciuic.training.format.tensors import stored_shape
from ciuic.training.json_documents import MALFORMED, decode_json
from ciuic.types import HOLE, ChunkId, Entry, SnapshotId
from ciuic.units import human_size, plural

_KEPT_BLOCKS: Final = 8
_INDEX_SUFFIX: Final = f"{SUFFIX}.index.json"


class FileRange(NamedTuple):
    """Range of a file that holds a tensor, or a block of it, in row-major order."""

    offsets: tuple[int, ...]
    """Indices of the first element in the whole tensor."""
    shape: tuple[int, ...]
    entry: Entry
    start: int
    """Offset of the first byte in the file."""
    size_bytes: int


class StoredTensor(NamedTuple):
    """A tensor of a saved state, unread."""

    kind: NumberKind
    shape: tuple[int, ...]
    ranges: tuple[FileRange, ...]
    """Ranges of files, sorted by offset."""


class BlockReader:
    """Reads ranges of files, and counts what it reads."""

    def __init__(self, repository: Repository) -> None:
        """Read nothing yet."""
        self._repository = repository
        self.block_size = repository.block_size
        self.read_bytes = 0
        # Tensors that are smaller than a block share it, and both sides share the header of a file.
        self._kept: OrderedDict[ChunkId, bytes] = OrderedDict()

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        """Return a range of a file.

        Raises:
            Damaged: A block cannot be read.
        """
        first, last = start // self.block_size, blocks_of(stop, self.block_size)
        begin = first * self.block_size
        if last - first <= 2:
            room = memoryview(b"".join(self._block(entry, at) for at in range(first, last)))
            return room[start - begin : stop - begin]
        room = memoryview(bytearray(min(last * self.block_size, entry.size_bytes) - begin))
        # The first block of a file has its header, and was read for that.
        kept = self._kept.get(self.ids(entry, first, first + 1).get(first, HOLE))
        done = 0 if kept is None else self.block_size
        if kept is not None:
            room[:done] = kept
        read_file(self._repository, entry, room[done:], first + bool(done))
        self.read_bytes += len(room) - done
        return room[start - begin : stop - begin]

    def ids(self, entry: Entry, first: int, stop: int) -> dict[int, ChunkId]:
        """Return the ids of the blocks of a file with ``first`` ≤ number < ``stop``; holes are left out."""
        blocks = blocks_of(entry.size_bytes, self.block_size)
        return dict(self._repository.block_maps.ids(entry.content, entry.map_height, blocks, first, stop))

    def _block(self, entry: Entry, at: int) -> bytes:
        chunk = self.ids(entry, at, at + 1).get(at, HOLE)
        if chunk == HOLE:
            return bytes(self.block_size)
        if chunk in self._kept:
            self._kept.move_to_end(chunk)
            return self._kept[chunk]
        data = self._repository.chunks.get(chunk)
        if len(data) > self.block_size:
            raise Damaged(f"chunk {chunk.hex()} is longer than a block")
        self.read_bytes += len(data)
        # A chunk may be shorter than its block, the rest of which is zeros (docs/format.md, section 6).
        self._kept[chunk] = data.ljust(self.block_size, b"\0")
        if len(self._kept) > _KEPT_BLOCKS:
            self._kept.popitem(last=False)
        return self._kept[chunk]


class DescribedTensor(NamedTuple):
    """Description of a tensor in the documents of a state."""

    own: dict[str, Any]
    """Object that stands for the tensor in `state.json` (`structure`)."""
    parts: tuple[tuple[str, str], ...]
    """Name and file of each stored part: one, or the pieces of a sharded tensor."""


class SavedState:
    """Tensors of a state that `SnapshotManager` saved, by name.

    Random generators and other values of the manager itself are left out: they differ in any two snapshots.
    """

    def __init__(
        self, repository: Repository, id_: SnapshotId, reader: BlockReader, below: bytes = b""
    ) -> None:
        """Read the documents of the state.

        Args:
            repository: Repository of the snapshot.
            id_: The snapshot.
            reader: Reads headers.
            below: Only tensors with a file at or below this path of the snapshot; empty: all.

        Raises:
            NotFound: There is no such snapshot, or it holds no training state.
            Damaged: A document cannot be read, or is not as it should be.
        """
        self.id = id_
        self._reader = reader
        snapshot = repository.snapshots.load(id_)
        root = snapshot.roots[0] if snapshot.roots else None
        self._files = Files(repository, top_of(None if root is None else root.entry, id_))
        if FACTS_FILE not in set(self._files.names()):
            raise NotFound(
                f"{id_} holds no training state, whose tensors could be compared",
                hint="ciuic diff without --tensors compares files",
            )
        self._headers: dict[tuple[bytes, int, int], dict[str, TensorInFile]] = {}
        self.size_bytes = sum(
            self._files.entry(one).size_bytes for one in self._files.names() if one.endswith(SUFFIX)
        )
        """Size of all files with tensors."""
        try:
            self._tensors = described_tensors(self._files.read(STATE_FILE), self._places)
        except ValueError as error:
            raise Damaged(f"the state of {id_} is malformed: {error}") from None
        if root is not None and below:
            self._keep_below(below, root.path)

    def names(self) -> Iterator[str]:
        """Iterate over the names: object and tensor, joined by a dot."""
        # As small tensors stand in the file that they share (`layout`): in the order of the state each would
        # be read from another block, of which only the last few are kept.
        return iter(
            sorted(self._tensors, key=lambda name: [(path, part) for part, path in self._tensors[name].parts])
        )

    def identity(self, name: str) -> Hashable:
        """Return what the documents say of the tensor, with the contents of its files."""
        described = self._tensors[name]
        own = json.dumps(described.own, sort_keys=True)
        entries = ((part, self._files.entry(path)) for part, path in described.parts)
        return own, tuple((part, one.content, one.map_height, one.size_bytes) for part, one in entries)

    def tensor(self, name: str) -> StoredTensor:
        """Return where the tensor is."""
        described = self._tensors[name]
        try:
            if described.own["$"] == "sharded":
                return self._sharded(name, described)
            return self._whole(name, described)
        except (*MALFORMED, ValueError) as error:
            raise Damaged(f"the tensor {name} of {self.id} is malformed: {error}") from None

    def _whole(self, name: str, described: DescribedTensor) -> StoredTensor:
        ((part, path),) = described.parts
        entry, where = self._located(part, path)
        own = described.own
        kind = number_kind(where.dtype, str(own.get("dtype", "")), of_torch=own.get("of") != "numpy")
        shape = stored_shape(own["shape"]) if "dtype" in own else where.shape
        size_bytes = where.stop - where.start
        # Of a dtype that is unknown here the bytes are compared, and their number is all that is known.
        if kind.read is not None and prod(shape) * kind.element_bytes != size_bytes:
            raise ValueError(f"a tensor of {kind.name} and shape {shape} cannot have {size_bytes} bytes")
        offsets = (0,) * len(shape)
        return StoredTensor(kind, shape, (FileRange(offsets, shape, entry, where.start, size_bytes),))

    def _sharded(self, name: str, described: DescribedTensor) -> StoredTensor:
        shape = stored_shape(described.own["shape"])
        own, ranges = str(described.own["dtype"]), {}
        kind = number_kind("U8", own)
        for part, path in described.parts:
            piece = parse_piece(part)
            assert piece is not None
            entry, where = self._located(part, path)
            sizes = piece_sizes(where.dtype, where.shape, kind.element_bytes)
            if kind.read is not None and prod(sizes) * kind.element_bytes != where.stop - where.start:
                raise ValueError(f"the piece {part} does not fit {own}")
            # Ranks that share no mesh may each have stored the same piece.
            ranges[piece[1], sizes] = FileRange(piece[1], sizes, entry, where.start, where.stop - where.start)
        if kind.read is None:
            raise Damaged(f"the tensor {name} of {self.id} is in pieces of {own}, which is not known here")
        if not is_whole(list(ranges), shape):
            raise Damaged(f"the pieces of the tensor {name} of {self.id} do not make up the whole")
        return StoredTensor(kind, shape, tuple(ranges[region] for region in sorted(ranges)))

    def _located(self, part: str, path: str) -> tuple[Entry, TensorInFile]:
        entry = self._files.entry(path)
        key = entry.content, entry.map_height, entry.size_bytes
        if key not in self._headers:
            self._headers[key] = read_header(
                lambda count: bytes(self._reader.read(entry, 0, count)),
                entry.size_bytes,
                self._reader.block_size,
                path,
            )
        if part not in self._headers[key]:
            raise Damaged(f"{path} of {self.id} has no tensor {part}")
        return entry, self._headers[key][part]

    def _places(self, object_name: str) -> dict[str, str]:
        """Return the file of each tensor of an object, from the index files of all ranks."""
        places: dict[str, str] = {}
        for path in self._files.names():
            if path.startswith(f"{object_name}/") and path.endswith(_INDEX_SUFFIX):
                index = decode_json(self._files.read(path), path)
                places |= {part: f"{object_name}/{file}" for part, file in index["weight_map"].items()}
        return places

    def _keep_below(self, below: bytes, root: bytes) -> None:
        """Leave out tensors that have no file at or below a path."""

        def is_below(file: str) -> bool:
            path = b"%s/%s" % (root, file.encode("utf-8", "surrogateescape"))
            return path == below or path.startswith(b"%s/" % below)

        self._tensors = {
            name: described
            for name, described in self._tensors.items()
            if any(is_below(path) for _, path in described.parts)
        }


def described_tensors(
    document: bytes | bytearray, places: Callable[[str], Mapping[str, str]]
) -> dict[str, DescribedTensor]:
    """Return what `state.json` says of each tensor, by object and path in its state, joined by dots.

    Args:
        document: Content of `state.json`.
        places: Returns the file of each stored part of an object.

    Raises:
        ValueError: The document is not as it should be.
    """
    state = decode_json(document, STATE_FILE)
    try:
        if state["version"] != STATE_VERSION:
            raise ValueError("it was written by a later version of ciuic")
        found: dict[str, DescribedTensor] = {}
        for object_name, skeleton in state["objects"].items():
            files = places(object_name)
            pieces: dict[str, list[tuple[str, str]]] = {}
            for part, path in sorted(files.items()):
                if (piece := parse_piece(part)) is not None:
                    pieces.setdefault(piece[0], []).append((part, path))
            for name, own in _tensors_of(skeleton, object_name):
                stored = own["name"]
                parts = pieces.get(stored, []) if own["$"] == "sharded" else [(stored, files[stored])]
                said = {key: value for key, value in own.items() if key not in ("parameter", "name")}
                found[_free_name(name, found)] = DescribedTensor(said, tuple(parts))
        return found
    except MALFORMED as error:
        raise ValueError(repr(error)) from None


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    """Return the name, with a number if it is taken: keys of a state may contain dots."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}#{number}", number + 1
    return free


def _tensors_of(skeleton: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path of each tensor in a packed state, and the object that stands for it, in their order.

    Not the name under which it is stored: tied tensors share one, and need not be tied in the other snapshot.
    """
    # With a stack: the document may be nested as deeply as the JSON reader allows.
    stack = [(name, skeleton)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict) and value.get("$") in ("tensor", "sharded"):
            yield path, value
        elif isinstance(value, (dict, list)):
            stack.extend((f"{path}.{key}" if key else path, one) for key, one in reversed(_members(value)))


def _members(value: dict[str, Any] | list[Any]) -> list[tuple[str, Any]]:
    """Return what a packed dict, list or other kind of value contains (`structure`), with their keys."""
    if isinstance(value, list):
        return [(str(at), one) for at, one in enumerate(value)]
    if "$" not in value:
        return list(value.items())
    if value["$"] == "dict":
        return [(_key_text(key), one) for key, one in value["items"]]
    inner = value.get("items", value.get("parts", value.get("value")))
    return _members(inner) if isinstance(inner, list) else [("", inner)]


def _key_text(key: Any) -> str:
    return str(key) if isinstance(key, (str, int)) or key is None else json.dumps(key)


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
    for change in _tensor_changes(before, after, reader, whole=whole):
        if change is None:
            identical += 1
        else:
            changes.append(change)
    size_bytes = before.size_bytes + after.size_bytes
    return StateDiff(old, new, changes, identical, reader.read_bytes, size_bytes)


_ROWS_BYTES: Final = 4 << 20


def _tensor_changes(
    old: SavedState, new: SavedState, reader: BlockReader, *, whole: bool
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
