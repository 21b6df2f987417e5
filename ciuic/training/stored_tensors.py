"""`SavedState` and what a tensor in a file of a snapshot is: read by ranges and blocks, where numbers are asked for.

Guarantees: opening a state reads its documents alone. Whatever a document or header claims was checked: a tensor is made of ranges inside of
its files that cover it exactly once. Memory: a few blocks.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from math import prod
from typing import Any, Final, NamedTuple, Protocol

from ciuic import __version__
from ciuic.errors import Damaged, NotFound, UsageError
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.snapshot_sets import SnapshotSet
from ciuic.training.change_figures import NumberKind, number_kind
from ciuic.training.format.layout import SUFFIX, TensorInFile, read_header
from ciuic.training.format.reading import FACTS_FILE, STATE_FILE, STATE_VERSION
from ciuic.training.format.shards import is_whole, parse_piece, piece_sizes
from ciuic.training.format.stored_files import Files, read_file, top_of
from ciuic.training.format.tensors import stored_shape
from ciuic.training.json_documents import MALFORMED, decode_json
from ciuic.types import HOLE, ChunkId, Entry, Snapshot, SnapshotId

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


class TensorSource(Protocol):
    """Tensors of one state or file, by name."""

    size_bytes: int
    """Size of all files with tensors."""

    def names(self) -> Iterator[str]:
        """Iterate over the names, in an order in which they can be read."""

    def identity(self, name: str) -> Hashable:
        """Return what only equal tensors of one repository have in common."""

    def tensor(self, name: str) -> StoredTensor:
        """Return where the tensor is."""


class DescribedTensor(NamedTuple):
    """Description of a tensor in the documents of a state."""

    own: dict[str, Any]
    """Object that stands for the tensor in `state.json` (`structure`)."""
    parts: tuple[tuple[str, str], ...]
    """Name and file of each stored part: one, or the pieces of a sharded tensor."""


class KnownSets:
    """Sets in a repository, looked up once, when a state is part of one."""

    def __init__(self, repository: Repository) -> None:
        """Read nothing yet."""
        self._repository = repository
        self._sets: list[SnapshotSet] | None = None

    def parts(self, snapshot: Snapshot) -> tuple[dict[str, Snapshot], tuple[str, ...]]:
        """Return the snapshots of the state that a snapshot is of, by member and in the order of the names, and the members that are not here."""
        place = snapshot.set_member
        if place is None or len(place.members) == 1:
            return {"": snapshot}, ()
        if self._sets is None:
            self._sets = self._repository.snapshots.sets()
        found = {place.member: snapshot}
        for one in self._sets:
            if (one.id, one.members) == (place.id, place.members):
                found = {**one.found, **found}
        lacking = tuple(one for one in place.members if one not in found)
        return {one: found[one] for one in place.members if one in found}, lacking


class _FilesOfParts:
    """Files of all parts of a state: those of the first, and of the others what is in folders, under names of their own.

    Not `loading_sets`, which reads headers: here the documents say where each tensor is, and entries are compared.
    """

    def __init__(self, parts: Mapping[str, Files]) -> None:
        (_, self._first), *others = parts.items()
        self._others: dict[str, tuple[Files, str]] = {}
        for member, files in others:
            for path in files.names():
                folder, slash, file = path.partition("/")
                if slash:
                    # No file has such a name; what comes first is that of the object.
                    self._others[f"{folder}/\0{member}/{file}"] = files, path

    def names(self) -> Iterator[str]:
        """Iterate over the paths."""
        yield from self._first.names()
        yield from self._others

    def read(self, path: str) -> bytearray:
        """Return the content of a document; as `Files.read`."""
        files, own = self._others.get(path, (self._first, path))
        return files.read(own)

    def entry(self, path: str) -> Entry:
        """Return the entry of a file; as `Files.entry`."""
        files, own = self._others.get(path, (self._first, path))
        return files.entry(own)


class SavedState:
    """Tensors of a state that `SnapshotManager` saved, by name.

    Random generators and other values of the manager itself are left out: they differ in any two snapshots.
    """

    def __init__(
        self,
        repository: Repository,
        id_: SnapshotId,
        reader: BlockReader,
        below: bytes = b"",
        sets: KnownSets | None = None,
    ) -> None:
        """Read the documents of the state; of one that is part of a set also those of the other parts in the repository.

        Args:
            repository: Repository of the snapshot.
            id_: The snapshot.
            reader: Reads headers.
            below: Only tensors with a file at or below this path of the snapshot; empty: all.
            sets: Sets in the repository, where several states are read; None: they are looked up.

        Raises:
            NotFound: There is no such snapshot, or it holds no training state.
            Damaged: A document cannot be read, or is not as it should be.
        """
        self.id = id_
        self._reader = reader
        snapshot = repository.snapshots.load(id_)
        root = snapshot.roots[0] if snapshot.roots else None
        parts, absent = (sets or KnownSets(repository)).parts(snapshot)
        self.lacking = (
            f"{id_} has a part of the state, and not here are those of {', '.join(absent)}" if absent else ""
        )
        """Missing parts of the state, in words; empty if there are none."""
        self._files = _FilesOfParts(
            {
                member: Files(repository, top_of(one.roots[0].entry if one.roots else None, one.id))
                for member, one in parts.items()
            }
        )
        if FACTS_FILE not in set(self._files.names()):
            raise NotFound(
                f"{id_} holds no training state, whose tensors could be compared",
                hint="-p FILE compares the tensors of a file; without --tensors files are compared",
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
        """Return where the tensor is.

        Raises:
            Damaged: what the state says of it is malformed.
        """
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
            if self.lacking:
                raise UsageError(self.lacking, hint="a remote of the training has all of them: --repo URL")
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
                folder = path.rpartition("/")[0]
                # What all parts have alike is read from the first.
                places = {part: f"{folder}/{file}" for part, file in index["weight_map"].items()} | places
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


def holds_state(repository: Repository, snapshot: Snapshot) -> bool:
    """Return whether a snapshot is a state that `SnapshotManager` saved."""
    root = snapshot.roots[0].entry if snapshot.roots else None
    return bool(
        root is not None and root.content and repository.trees.entry(root.content, FACTS_FILE.encode("ascii"))
    )


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
            raise ValueError(f"it was written by a later version of ciuic than {__version__}")
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
