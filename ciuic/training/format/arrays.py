"""Tensors of a snapshot, read in several threads, each with a repository of its own.

Of tensors in pieces (from several ranks) only the parts that are needed are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from ciuic.training.format import tensors
from ciuic.training.format.files import CHUNKS_AT_ONCE, Files, read_file, reader_count
from ciuic.training.format.layout import TensorInFile, decode_header
from ciuic.training.format.pieces import PiecewiseTensor, RangeReader, StoredPiece
from ciuic.training.format.places import ReadFrom, open_repository
from ciuic.training.format.shards import parse_piece
from ciuic.types import Entry

_PIECE_MARK: Final = "@"
"""Character in the name of a file that holds one piece of a tensor."""


class _Buffer(NamedTuple):
    """Memory for a file."""

    entry: Entry
    owner: Any
    """Owner of the memory, as `tensors.empty_buffer` returns it; None: of the header alone."""
    memory: memoryview


class _Range(NamedTuple):
    """Part of a file, and where it is to be read to."""

    entry: Entry
    memory: memoryview
    first_block: int


class _Found(NamedTuple):
    """A tensor and the file that holds it."""

    owner: Any
    """Buffer with the bytes of the file; None: not read yet."""
    path: str
    where: TensorInFile


def arrays_of(
    path: ReadFrom, files: Files, names: Sequence[str], source: RangeReader | None = None
) -> Arrays:
    """Read the tensors in these files.

    Args:
        path: Path of the repository, or a function that opens it.
        files: Files of the snapshot.
        names: Paths of the files to read.
        source: Reads pieces of tensors later, on demand; None: there must be no pieces.

    Raises:
        Damaged: A file cannot be read.
    """
    arrays = Arrays(path, files, source)
    arrays.fetch(sorted(names))
    return arrays


class Arrays:
    """Tensors by object and name.

    `fetch` reads whole tensors; for one in pieces `lookup` returns a `PiecewiseTensor`.
    """

    def __init__(self, path: ReadFrom, files: Files, source: RangeReader | None = None) -> None:
        """Read nothing yet."""
        self._path = path
        self._files = files
        self._source = source
        self._found: dict[str, dict[str, _Found]] = {}
        self._pieces: dict[tuple[str, str], list[StoredPiece]] = {}
        self._made: dict[tuple[str, str], Any] = {}

    def fetch(self, names: Sequence[str]) -> None:
        """Read files.

        Raises:
            NotFound: There is no such file.
            Damaged: A file cannot be read.
        """
        buffers = [self._allocated(name) for name in names]
        # Ranges instead of files, so that the threads have about as much to read each; in the order in which
        # the files were stored, and so of positions in the packs.
        size_bytes = CHUNKS_AT_ONCE * self._files.block_size
        ranges = [
            _Range(buffer.entry, buffer.memory[start : start + size_bytes], start // self._files.block_size)
            for buffer in buffers
            for start in range(0, len(buffer.memory), size_bytes)
        ]
        queue, threads = iter(ranges), reader_count()
        # Each thread opens the repository itself: its index and its caches are for one thread.
        with ThreadPoolExecutor(threads, "ciuic-load") as pool:
            for done in [pool.submit(self._read_ranges, queue) for _ in range(threads)]:
                done.result()
        for name, (entry, owner, memory) in zip(names, buffers, strict=True):
            self._note(name, owner, _header(memory, entry.size_bytes, name))

    def _allocated(self, name: str) -> _Buffer:
        """Return memory for what is read of a file at first."""
        entry = self._files.entry(name)
        # Of a large piece only the block with the header: which rows of it are needed is known later.
        if self._source is not None and _PIECE_MARK in name and entry.size_bytes > self._files.block_size:
            return _Buffer(entry, None, memoryview(bytearray(self._files.block_size)))
        return _Buffer(entry, *tensors.empty_buffer(entry.size_bytes))

    def _read_ranges(self, queue: Iterator[_Range]) -> None:
        """Read ranges until the queue, which the threads share, is empty."""
        try:
            with open_repository(self._path) as repository:
                for entry, memory, first_block in queue:
                    read_file(repository, entry, memory, first_block)
        except BaseException:
            # The other threads end too.
            for _ in queue:
                pass
            raise

    def _note(self, path: str, owner: Any, held: Mapping[str, TensorInFile]) -> None:
        object_name = path.partition("/")[0]
        for tensor, facts in held.items():
            self._found.setdefault(object_name, {})[tensor] = _Found(owner, path, facts)
            piece = parse_piece(tensor)
            if piece is not None:
                self._pieces.setdefault((object_name, piece[0]), []).append(
                    StoredPiece(piece[1], path, facts)
                )

    def has_pieces(self, object_name: str) -> bool:
        """Return whether any tensor of an object is in pieces."""
        return any(of == object_name for of, _ in self._pieces)

    def lookup(self, object_name: str) -> Any:
        """Return the function that finds tensors of one object, for `unpacking.unpack`."""

        def tensor(name: str, packed: dict[str, Any]) -> Any:
            key = object_name, name
            # Tied tensors have the same name, and must come back as one.
            if key not in self._made:
                self._made[key] = self._make(object_name, name, packed)
            return self._made[key]

        return tensor

    def _make(self, object_name: str, name: str, packed: dict[str, Any]) -> Any:
        if packed["$"] == "sharded":
            if self._source is None:
                raise ValueError(f"the tensor {object_name}.{name} is in pieces, expected a whole tensor")
            return PiecewiseTensor(name, packed, self._pieces.get((object_name, name), []), self._source)
        try:
            owner, path, facts = self._found[object_name][name]
        except KeyError:
            raise ValueError(f"the tensor {object_name}.{name} is in no file") from None
        if owner is None:
            # A whole tensor whose own name has the mark of pieces: no more than its header was read.
            assert self._source is not None
            owner = self._source.read(path, 0, self._files.entry(path).size_bytes)
        array = tensors.Array(
            "numpy" if packed.get("of") == "numpy" else "torch",
            facts.dtype,
            facts.shape,
            facts.stop - facts.start,
            packed.get("dtype", ""),
            tuple(packed.get("shape", ())),
        )
        return tensors.from_buffer(owner, facts.start, array)


def _header(start: memoryview, size_bytes: int, name: str) -> dict[str, TensorInFile]:
    """Return the tensors in a file.

    Args:
        start: First bytes of the file.
        size_bytes: Size of the file.
        name: What errors call it.

    Raises:
        ValueError: The header is not as it should be.
    """
    # Most headers have 4096 bytes (`layout.encode_header`); only those of many small tensors are decoded
    # again, with as many bytes as they say.
    header = decode_header(start.tobytes() if len(start) < 8192 else bytes(start[:8192]), size_bytes)
    if isinstance(header, int):
        header = decode_header(bytes(start[:header]), size_bytes)
    if isinstance(header, int):
        raise ValueError(f"the header of {name} has no end")
    return header
