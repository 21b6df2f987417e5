"""Reading of the files and tensors of a training snapshot, each byte with its checksum.

Guarantees: every byte that is read was checked. Of tensors in pieces (from several ranks) only the blocks that are
needed are read; a tensor whose pieces do not make up the whole is reported as damaged when the snapshot is opened.
Whole tensors are read in several threads, each with a repository of its own. Needs no writer and no lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod
from operator import sub
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from ciuic.errors import Damaged, NotFound
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.training.format import tensors
from ciuic.training.format.layout import TensorInFile, decode_header, read_header
from ciuic.training.format.shards import (
    Region,
    TemplateLookup,
    is_inside,
    is_sharded,
    is_whole,
    local_block,
    map_leaves,
    narrowed,
    overlap,
    parse_piece,
    piece_sizes,
    with_local,
)
from ciuic.training.format.tensors import empty_buffer, stored_shape
from ciuic.training.free_resources import reader_count
from ciuic.training.json_documents import MAX_DOCUMENT_BYTES
from ciuic.types import ChunkId, Entry, SnapshotId

ReadFrom: TypeAlias = "str | Callable[[], Repository]"
"""Path of a repository, or a function that opens it once more; any thread may call it."""


def open_repository(place: ReadFrom) -> Repository:
    """Open a repository for the calling thread."""
    return Repository.open(place) if isinstance(place, str) else place()


# Chunks that are read with one query: bases of differences are looked up together, not one by one.
# So many that the disk works on the later ones while the first are decoded.
CHUNKS_AT_ONCE: Final = 128
_ZEROS: Final = memoryview(bytes(1 << 20))


class StateFiles(Protocol):
    """Files of a state by path, for the thread that opened them."""

    @property
    def block_size(self) -> int:
        """Size of a block of the files in bytes; a checksum is that of a block."""

    @property
    def time_ns(self) -> int:
        """Place of the state in the order of snapshots; 0: not known."""

    def names(self) -> Iterator[str]:
        """Iterate over the paths."""

    def size_bytes(self, name: str) -> int:
        """Return the size of a file; NotFound if there is none."""

    def read(self, name: str) -> bytearray:
        """Return the content of a document; as `Files.read`."""

    def read_into(self, name: str, into: memoryview, first_block: int = 0) -> None:
        """Read and check content; as `read_file`."""

    def known_start(self, name: str) -> bytes | None:
        """Return the start of a file, with its header, if that is known without reading it."""


class StateRef(Protocol):
    """A stored state, which each thread opens for itself."""

    def open(self) -> AbstractContextManager[StateFiles]:
        """Open its files for the calling thread.

        Raises:
            NotFound: There is no such snapshot, or it holds no training state.
            Damaged: The snapshot cannot be read.
        """


class SnapshotRef(NamedTuple):
    """Repository and id of a snapshot, so that several threads can each open the repository."""

    path: ReadFrom
    id: str

    def files(self, repository: Repository) -> Files:
        """Return the files of the snapshot.

        Raises:
            NotFound: There is no such snapshot, or it holds no training state.
            Damaged: The snapshot cannot be read.
        """
        # In a remote an id that two hosts have stands behind the name of its host.
        id_ = SnapshotId.parse(self.id) if isinstance(self.path, str) else SnapshotId(self.id)
        snapshot = repository.snapshots.load(id_)
        # A training's snapshot has one root.
        top = top_of(snapshot.roots[0].entry if snapshot.roots else None, self.id)
        return Files(repository, top, snapshot.order_ns)

    @contextmanager
    def open(self) -> Iterator[Files]:
        """Open the repository, and yield the files of the snapshot; as `StateRef.open`."""
        with open_repository(self.path) as repository:
            yield self.files(repository)


def top_of(entry: Entry | None, id_: str) -> Entry:
    """Return the directory that holds the state.

    Raises:
        NotFound: The snapshot holds no training state.
    """
    if entry is None:
        raise NotFound(f"{id_} holds no training state")
    return entry


class Files:
    """Regular files of a snapshot by path, read on demand."""

    def __init__(self, repository: Repository, top: Entry, time_ns: int = 0) -> None:
        """List the files of the directory and of its subdirectories, one level deep."""
        self._repository = repository
        self._time_ns = time_ns
        self._entries: dict[str, Entry] = {}
        for entry in repository.trees.entries(top.content):
            name = os.fsdecode(entry.name)
            if not entry.is_dir:
                self._entries[name] = entry
                continue
            for inner in repository.trees.entries(entry.content):
                self._entries[f"{name}/{os.fsdecode(inner.name)}"] = inner

    def names(self) -> Iterator[str]:
        """Iterate over the paths, relative to the root of the snapshot."""
        return iter(self._entries)

    def entry(self, name: str) -> Entry:
        """Return the entry of a file.

        Raises:
            NotFound: There is no such file.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise NotFound(f"there is no {name} in it, so it is no training state") from None

    @property
    def block_size(self) -> int:
        """Size of a block of the files in bytes."""
        return self._repository.block_size

    @property
    def time_ns(self) -> int:
        """Place of the state in the order of snapshots; 0: not known."""
        return self._time_ns

    def size_bytes(self, name: str) -> int:
        """Return the size of a file; NotFound if there is none."""
        return self.entry(name).size_bytes

    def read_into(self, name: str, into: memoryview, first_block: int = 0) -> None:
        """Read and check content; as `read_file`."""
        read_file(self._repository, self.entry(name), into, first_block)

    def known_start(self, name: str) -> bytes | None:
        """Return None: nothing is known of a file before it is read."""
        return None

    def read(self, name: str) -> bytearray:
        """Return the content of a document.

        Raises:
            NotFound: There is no such file.
            Damaged: The file is too large for a document, or cannot be read.
        """
        entry = self.entry(name)
        if entry.size_bytes > MAX_DOCUMENT_BYTES:
            raise Damaged(f"{name} must have at most {MAX_DOCUMENT_BYTES} bytes, got {entry.size_bytes}")
        room = bytearray(entry.size_bytes)
        read_file(self._repository, entry, memoryview(room))
        return room

    def header(self, name: str) -> dict[str, TensorInFile]:
        """Return the tensors of a safetensors file, of which only the header is read.

        Raises:
            NotFound: There is no such file.
            Damaged: The file cannot be read.
            ValueError: The header is not as it should be.
        """
        entry = self.entry(name)

        def start(count: int) -> bytes:
            # `read_file` fills whole blocks.
            room = bytearray(min(-(-count // self.block_size) * self.block_size, entry.size_bytes))
            read_file(self._repository, entry, memoryview(room))
            return bytes(room)

        return read_header(start, entry.size_bytes, self.block_size, name)


def first_bytes(files: StateFiles, name: str) -> bytes:
    """Return the start of a safetensors file up to the end of its header.

    Raises:
        Damaged: The file cannot be read.
        ValueError: The header is not as it should be.
    """
    size_bytes, block_size = files.size_bytes(name), files.block_size

    def start(count: int) -> bytes:
        # `read_into` fills whole blocks.
        room = bytearray(min(-(-count // block_size) * block_size, size_bytes))
        files.read_into(name, memoryview(room))
        return bytes(room)

    read = start(1)
    if isinstance(needed := decode_header(read, size_bytes), int):
        read = start(needed)
        decode_header(read, size_bytes)
    return read[: 8 + int.from_bytes(read[:8], "little")]


def read_file(repository: Repository, entry: Entry, into: memoryview, first_block: int = 0) -> None:
    """Read and check the content of a regular file.

    Args:
        repository: Repository of the file.
        entry: The file.
        into: Destination; it ends at the end of a block or of the file, and what it holds is overwritten.
        first_block: Block of the file at which to begin.

    Raises:
        Damaged: A chunk cannot be read.
    """
    block_size = repository.block_size
    blocks = blocks_of(entry.size_bytes, block_size)
    stop = first_block + blocks_of(len(into), block_size)
    run: list[tuple[int, ChunkId]] = []
    hole_from = 0
    for index, chunk in repository.block_maps.ids(entry.content, entry.map_height, blocks, first_block, stop):
        at = index - first_block
        # Blocks that the map leaves out are holes, which read as zeros.
        _fill_zeros(into, hole_from * block_size, at * block_size)
        hole_from = at + 1
        run.append((at, chunk))
        if len(run) == CHUNKS_AT_ONCE:
            _read_run(repository, run, into)
            run = []
    _read_run(repository, run, into)
    _fill_zeros(into, hole_from * block_size, len(into))


def _fill_zeros(into: memoryview, start: int, stop: int) -> None:
    # In pieces: a hole may be as large as memory, and its zeros must not take as much again.
    while start < stop:
        end = min(stop, start + len(_ZEROS))
        into[start:end] = _ZEROS[: end - start]
        start = end


def _read_run(repository: Repository, run: list[tuple[int, ChunkId]], into: memoryview) -> None:
    block_size = repository.block_size
    rooms = [into[at * block_size : min((at + 1) * block_size, len(into))] for at, _ in run]
    # Read straight to their places; for those that cannot be read so, `chunks.get` finds a good copy or tells
    # what is wrong.
    for position in repository.into_memory.read([chunk for _, chunk in run], rooms):
        chunk, room = run[position][1], rooms[position]
        data = repository.chunks.get(chunk)
        if len(data) > len(room):
            raise Damaged(f"chunk {chunk.hex()} is longer than the block it stands for")
        # A chunk may be shorter than its block, the rest of which is zeros (docs/format.md, section 6).
        room[: len(data)] = data
        room[len(data) :] = bytes(len(room) - len(data))


class StoredPiece(NamedTuple):
    """A block of a tensor, and the file that holds it."""

    offsets: tuple[int, ...]
    """Indices of the first element in the whole tensor."""
    path: str
    """Path of the file in the snapshot."""
    where: TensorInFile


class _Block(NamedTuple):
    """Block of a file as it was read."""

    path: str
    number: int
    room: Any
    """Its bytes, a torch tensor."""


class RangeReader:
    """Reads ranges of files of one state in several threads, each of which opens it once."""

    def __init__(self, state: StateRef) -> None:
        """Open nothing yet."""
        self._state = state
        # Opened by each thread: the index and the caches of a repository are for one thread.
        self._thread_local = threading.local()
        self._opened = ExitStack()

    def close(self) -> None:
        """Close what all threads have opened."""
        self._opened.close()

    def read(self, path: str, start: int, size_bytes: int) -> Any:
        """Return a range of a file as a torch tensor of bytes.

        Raises:
            Damaged: The range cannot be read, or the file is too short.
        """
        files = self._opened_by_thread()
        file_bytes = files.size_bytes(path)
        block_size = files.block_size
        # Whole blocks, because a checksum is that of a block.
        first = start // block_size
        stop = min(-(-(start + size_bytes) // block_size) * block_size, file_bytes)
        if start + size_bytes > file_bytes:
            raise Damaged(f"{path} is shorter than it was")
        begin = start - first * block_size
        if stop - first * block_size > block_size:
            room, memory = empty_buffer(stop - first * block_size)
            files.read_into(path, memory, first)
            return room[begin : begin + size_bytes]
        # Small tensors lie beside one another: each block of them is read and checked once, not once a tensor.
        kept: _Block | None = getattr(self._thread_local, "block", None)
        if kept is None or (kept.path, kept.number) != (path, first):
            room, memory = empty_buffer(stop - first * block_size)
            files.read_into(path, memory, first)
            kept = self._thread_local.block = _Block(path, first, room)
        # A copy: what is returned may be changed, and must not hold the whole block.
        return kept.room[begin : begin + size_bytes].clone()

    def read_block(
        self,
        path: str,
        start: int,
        dtype: Any,
        sizes: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
    ) -> Any:
        """Return a block of a tensor that is contiguous in a file.

        Args:
            path: Path of the file.
            start: Offset of the tensor's first byte.
            dtype: dtype of torch.
            sizes: Shape of the tensor.
            offsets: Indices of the block's first element.
            lengths: Shape of the block.

        Raises:
            Damaged: The range cannot be read, or the file is too short.
        """
        import torch

        # Whole rows: these are contiguous in the file; other dimensions are cut in memory.
        shape = (*lengths[:1], *sizes[1:])
        size_bytes = prod(shape) * dtype.itemsize
        if size_bytes:
            first = offsets[0] if offsets else 0
            data = self.read(path, start + first * prod(sizes[1:]) * dtype.itemsize, size_bytes)
            # A view of another dtype must begin at a multiple of its element size.
            if data.storage_offset() % dtype.itemsize:
                data = data.clone()
            rows = data.view(dtype).view(shape)
        else:
            rows = torch.empty(shape, dtype=dtype, device="cpu")
        return narrowed(rows, [start if dimension else 0 for dimension, start in enumerate(offsets)], lengths)

    def _opened_by_thread(self) -> StateFiles:
        if not hasattr(self._thread_local, "files"):
            self._thread_local.files = self._opened.enter_context(self._state.open())
        return self._thread_local.files  # type: ignore[no-any-return]


class PiecewiseTensor:
    """A tensor in pieces, of which blocks can be read."""

    def __init__(
        self, name: str, said: Mapping[str, Any], pieces: Sequence[StoredPiece], source: RangeReader
    ) -> None:
        """Check that the pieces make up the whole tensor.

        Args:
            name: What errors call it.
            said: Object that stands for the tensor in `state.json`.
            pieces: Pieces that the snapshot has.
            source: Reads them.

        Raises:
            Damaged: Elements are missing or there twice.
            ValueError: This torch does not know the dtype, or the shape is none.
        """
        self.shape = stored_shape(said["shape"])
        # Ranks that share no mesh (FSDP2 within tensor parallel groups) may each have stored the same piece.
        self._pieces = list({(piece.offsets, piece.where.shape): piece for piece in pieces}.values())
        self._source = source
        self._dtype = tensors.torch_dtype(said["dtype"])
        # Otherwise elements would be read from memory that nothing was written to.
        if not is_whole(regions := [self._region(piece) for piece in self._pieces], self.shape):
            # A piece that reaches out of the tensor counts as missing.
            inside = [region for region in regions if is_inside(region, self.shape)]
            here = sum(prod(sizes) for _, sizes in inside)
            if len(inside) < len(regions) or here != prod(self.shape):
                raise Damaged(f"of the tensor {name} there are {here} elements of {prod(self.shape)}")
            raise Damaged(f"of the tensor {name} some elements are there twice, and others are missing")

    def read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        """Return a block of the tensor, on the CPU.

        Args:
            offsets: Indices of the first element.
            sizes: Shape of the block.

        Raises:
            Damaged: A piece cannot be read.
        """
        import torch

        # Not zeroed: the constructor has checked that the pieces make up the whole tensor.
        block = torch.empty(sizes, dtype=self._dtype, device="cpu")
        if not block.numel():
            return block
        for piece in self._pieces:
            region = self._region(piece)
            if (common := overlap((offsets, sizes), region)) is None:
                continue
            first, lengths = common
            within = tuple(map(sub, first, piece.offsets))
            found = self._source.read_block(
                piece.path, piece.where.start, self._dtype, region[1], within, lengths
            )
            narrowed(block, tuple(map(sub, first, offsets)), lengths).copy_(found)
        return block

    def whole(self) -> Any:
        """Return the whole tensor in memory, put together from its pieces."""
        return self.read((0,) * len(self.shape), self.shape)

    def _region(self, piece: StoredPiece) -> Region:
        where = piece.where
        return piece.offsets, piece_sizes(where.dtype, where.shape, self._dtype.itemsize)


def cut_to_templates(state: Any, template: TemplateLookup) -> Any:
    """Cut each tensor of a state to this rank's part.

    Args:
        state: State with whole tensors, or a `PiecewiseTensor` in place of one.
        template: Template; where it has no DTensor the tensor stays whole.

    Raises:
        Damaged: A tensor cannot be read.
    """
    # Two passes: the first begins to read all tensors, the second collects them.
    with ThreadPoolExecutor(reader_count(), "ciuic-load") as pool:

        def fit(value: Any, path: tuple[Any, ...]) -> Any:
            if isinstance(value, PiecewiseTensor) or type(value).__name__ == "Tensor":
                return pool.submit(_cut_to_template, value, template(path))
            return value

        begun = map_leaves(state, fit)
        return map_leaves(begun, lambda value, _: value.result() if isinstance(value, Future) else value)


def _cut_to_template(value: Any, like: Any) -> Any:
    if not is_sharded(like) or tuple(like.shape) != tuple(value.shape):
        return value.whole() if isinstance(value, PiecewiseTensor) else value
    import torch

    offsets, local = local_block(like)
    if isinstance(value, PiecewiseTensor):
        block = value.read(offsets, tuple(local.shape))
    else:
        block = narrowed(value, offsets, local.shape)
    here = torch.empty_like(local, dtype=block.dtype, requires_grad=False)
    here.copy_(block)
    return with_local(like, here)


# Most headers have 4096 bytes (`layout.encode_header`); only those of many small tensors are decoded again.
_FIRST_BYTES: Final = 8192
_PIECE_MARK: Final = "@"
"""Character in the name of a file that holds one piece of a tensor."""


class _Buffer(NamedTuple):
    """Memory for a file."""

    name: str
    owner: Any
    """Owner of the memory, as `tensors.empty_buffer` returns it; None: of the header alone."""
    memory: memoryview


class _Range(NamedTuple):
    """Part of a file, and where it is to be read to."""

    name: str
    memory: memoryview
    first_block: int


class _Found(NamedTuple):
    """A tensor and the file that holds it."""

    owner: Any
    """Buffer with the bytes of the file; None: not read yet."""
    path: str
    where: TensorInFile


def arrays_of(
    state: StateRef, files: StateFiles, names: Sequence[str], source: RangeReader | None = None
) -> Arrays:
    """Read the tensors in these files.

    Args:
        state: The state, which further threads open.
        files: Its files, for this thread.
        names: Paths of the files to read.
        source: Reads pieces of tensors later, on demand; None: there must be no pieces.

    Raises:
        Damaged: A file cannot be read.
    """
    arrays = Arrays(state, files, source)
    arrays.fetch(sorted(names))
    return arrays


class Arrays:
    """Tensors by object and name.

    `fetch` reads whole tensors; for one in pieces `lookup` returns a `PiecewiseTensor`.
    """

    def __init__(self, state: StateRef, files: StateFiles, source: RangeReader | None = None) -> None:
        """Read nothing yet."""
        self._state = state
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
            _Range(buffer.name, buffer.memory[start : start + size_bytes], start // self._files.block_size)
            for buffer in buffers
            if self._files.known_start(buffer.name) is None
            for start in range(0, len(buffer.memory), size_bytes)
        ]
        queue, threads = iter(ranges), reader_count()
        # Each thread opens the repository itself: its index and its caches are for one thread.
        with ThreadPoolExecutor(threads, "ciuic-load") as pool:
            for done in [pool.submit(self._read_ranges, queue) for _ in range(threads)]:
                done.result()
        for name, (_, owner, memory) in zip(names, buffers, strict=True):
            self._note(name, owner, memory)

    def _allocated(self, name: str) -> _Buffer:
        """Return memory for what is read of a file at first."""
        size_bytes = self._files.size_bytes(name)
        if (header := self._files.known_start(name)) is not None:
            return _Buffer(name, None, memoryview(header))
        # Of a large piece only the block with the header: which rows of it are needed is known later.
        if self._source is not None and _PIECE_MARK in name and size_bytes > self._files.block_size:
            return _Buffer(name, None, memoryview(bytearray(self._files.block_size)))
        return _Buffer(name, *tensors.empty_buffer(size_bytes))

    def _read_ranges(self, queue: Iterator[_Range]) -> None:
        """Read ranges until the queue, which the threads share, is empty."""
        try:
            with self._state.open() as files:
                for name, memory, first_block in queue:
                    files.read_into(name, memory, first_block)
        except BaseException:
            # The other threads end too.
            for _ in queue:
                pass
            raise

    def _note(self, path: str, owner: Any, start: memoryview) -> None:
        """Note the tensors of a file, of which at least the start was read."""
        object_name = path.partition("/")[0]
        # Of such a file only pieces may be needed.
        has_all = self._files.known_start(path) is None
        held = read_header(
            lambda count: bytes(start[:count]), self._files.size_bytes(path), _FIRST_BYTES, path
        )
        for tensor, facts in held.items():
            piece = parse_piece(tensor)
            if has_all or piece is not None:
                self._found.setdefault(object_name, {})[tensor] = _Found(owner, path, facts)
            if piece is not None:
                self._pieces.setdefault((object_name, piece[0]), []).append(
                    StoredPiece(piece[1], path, facts)
                )

    def has_pieces(self, object_name: str) -> bool:
        """Return whether any tensor of an object is in pieces."""
        return any(of == object_name for of, _ in self._pieces)

    def lookup(self, object_name: str) -> Any:
        """Return the function that finds tensors of one object, for `structure.unpack`."""

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
            owner = self._source.read(path, 0, self._files.size_bytes(path))
        array = tensors.Array(
            "numpy" if packed.get("of") == "numpy" else "torch",
            facts.dtype,
            facts.shape,
            facts.stop - facts.start,
            packed.get("dtype", ""),
            tuple(packed.get("shape", ())),
        )
        return tensors.from_buffer(owner, facts.start, array)
