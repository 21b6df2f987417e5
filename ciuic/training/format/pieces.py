"""Tensors that a snapshot holds in pieces, of which only the needed blocks are read.

Guarantees: every byte that is read was checked. A tensor whose pieces do not make up the whole is reported as
damaged when the snapshot is opened.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

from ciuic.errors import Damaged
from ciuic.repository import Repository
from ciuic.training.format.files import Files, SnapshotRef, read_file
from ciuic.training.format.layout import TensorInFile
from ciuic.training.format.places import open_repository
from ciuic.training.format.tensors import empty_buffer, stored_shape

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block."""
_MAX_CUT_DIMENSIONS: Final = 8


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
    """Reads ranges of files of one snapshot in several threads, each of which opens the repository once."""

    def __init__(self, opened: SnapshotRef) -> None:
        """Open nothing yet."""
        self._opened = opened
        # One repository for each thread: its index and its caches are for one thread.
        self._thread_local = threading.local()
        self._repositories: list[Repository] = []

    def close(self) -> None:
        """Close the repositories of all threads."""
        for repository in self._repositories:
            repository.close()

    def read(self, path: str, start: int, size_bytes: int) -> Any:
        """Return a range of a file as a torch tensor of bytes.

        Raises:
            Damaged: The range cannot be read, or the file is too short.
        """
        repository, files = self._opened_by_thread()
        entry = files.entry(path)
        block_size = repository.block_size
        # Whole blocks, because a checksum is that of a block.
        first = start // block_size
        stop = min(-(-(start + size_bytes) // block_size) * block_size, entry.size_bytes)
        if start + size_bytes > entry.size_bytes:
            raise Damaged(f"{path} is shorter than it was")
        begin = start - first * block_size
        if stop - first * block_size > block_size:
            room, memory = empty_buffer(stop - first * block_size)
            read_file(repository, entry, memory, first)
            return room[begin : begin + size_bytes]
        # Small tensors lie beside one another: each block of them is read and checked once, not once a tensor.
        kept: _Block | None = getattr(self._thread_local, "block", None)
        if kept is None or (kept.path, kept.number) != (path, first):
            room, memory = empty_buffer(stop - first * block_size)
            read_file(repository, entry, memory, first)
            kept = self._thread_local.block = _Block(path, first, room)
        # A copy: what is returned may be changed, and must not hold the whole block.
        return kept.room[begin : begin + size_bytes].clone()

    def read_rows(
        self, path: str, start: int, dtype: Any, sizes: tuple[int, ...], first: int = 0, count: int = 1
    ) -> Any:
        """Return rows of a tensor that is contiguous in a file.

        Args:
            path: Path of the file.
            start: Offset of the tensor's first byte.
            dtype: dtype of torch.
            sizes: Shape of the tensor; without a dimension it is read whole.
            first: First row.
            count: Number of rows.

        Raises:
            Damaged: The range cannot be read, or the file is too short.
        """
        import torch

        shape = (count, *sizes[1:]) if sizes else ()
        size_bytes = prod(shape) * dtype.itemsize
        if not size_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if sizes:
            start += first * prod(sizes[1:]) * dtype.itemsize
        data = self.read(path, start, size_bytes)
        # A view of another dtype must begin at a multiple of its element size.
        if data.storage_offset() % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(shape)

    def _opened_by_thread(self) -> tuple[Repository, Files]:
        if not hasattr(self._thread_local, "files"):
            repository = open_repository(self._opened.path)
            self._repositories.append(repository)
            self._thread_local.files = repository, self._opened.files(repository)
        return self._thread_local.files  # type: ignore[no-any-return]


class PiecewiseTensor:
    """A tensor in pieces; a `shards.ReadableTensor`."""

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
        import torch

        self.shape = stored_shape(said["shape"])
        # Ranks that share no mesh (FSDP2 within tensor parallel groups) may each have stored the same piece.
        self._pieces = list({(piece.offsets, piece.where.shape): piece for piece in pieces}.values())
        self._source = source
        dtype = getattr(torch, said["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this torch has no dtype {said['dtype']}")
        self._dtype = dtype
        regions = [(piece.offsets, self._sizes(piece)) for piece in self._pieces]
        # A piece that reaches out of the tensor counts as missing.
        inside = [region for region in regions if is_inside(*region, self.shape)]
        here = sum(prod(sizes) for _, sizes in inside)
        if len(inside) < len(regions) or here != prod(self.shape):
            raise Damaged(f"of the tensor {name} there are {here} elements of {prod(self.shape)}")
        # The right number of elements, some of them twice: then as many others are missing, and would be
        # read from memory that nothing was written to.
        if not covers(inside, self.shape):
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
        # Copy the intersection of the block with each piece.
        for piece in self._pieces:
            its = self._sizes(piece)
            low = [max(one, other) for one, other in zip(offsets, piece.offsets, strict=True)]
            high = [
                min(one + size, other + its_size)
                for one, size, other, its_size in zip(offsets, sizes, piece.offsets, its, strict=True)
            ]
            if any(start >= stop for start, stop in zip(low, high, strict=True)):
                continue
            # Rows are cut by reading no others, the other dimensions in memory.
            target, found = block, self._rows(piece, its, low, high)
            for dimension, (start, stop) in enumerate(zip(low, high, strict=True)):
                target = target.narrow(dimension, start - offsets[dimension], stop - start)
                if dimension:
                    found = found.narrow(dimension, start - piece.offsets[dimension], stop - start)
            target.copy_(found)
        return block

    def whole(self) -> Any:
        """Return the whole tensor."""
        return self.read((0,) * len(self.shape), self.shape)

    def _rows(self, piece: StoredPiece, its: tuple[int, ...], low: list[int], high: list[int]) -> Any:
        """Read the rows of a piece between ``low[0]`` and ``high[0]``: these are contiguous in the file."""
        first, count = (low[0] - piece.offsets[0], high[0] - low[0]) if its else (0, 1)
        return self._source.read_rows(piece.path, piece.where.start, self._dtype, its, first, count)

    def _sizes(self, piece: StoredPiece) -> tuple[int, ...]:
        """Return the shape of a piece.

        One whose dtype has no name in safetensors is stored as bytes along the last dimension.
        """
        sizes = piece.where.shape
        if piece.where.dtype == "U8" and sizes:
            return (*sizes[:-1], sizes[-1] // self._dtype.itemsize)
        return sizes


def is_inside(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a block lies within a tensor of this shape."""
    return len(offsets) == len(sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def covers(regions: Sequence[Region], shape: tuple[int, ...]) -> bool:
    """Return whether blocks within a tensor cover each of its elements exactly once.

    Takes time linear in the number of blocks, times 2 to the number of dimensions that are cut.

    Args:
        regions: Blocks that lie inside of the tensor and have as many elements together as it has.
        shape: Shape of the tensor.
    """
    # A block without elements has corners all the same.
    if not prod(shape):
        return True
    regions = [region for region in regions if prod(region[1])]
    whole: Region = ((0,) * len(shape), shape)
    cut = [
        dimension
        for dimension, size in enumerate(shape)
        if any(offsets[dimension] or sizes[dimension] != size for offsets, sizes in regions)
    ]
    # No mesh has so many dimensions; pairs then take less time than corners.
    if len(cut) > _MAX_CUT_DIMENSIONS:
        return not any(_overlap(*pair) for pair in itertools.combinations(regions, 2))
    # How often each element is covered is the running sum, along each dimension, of numbers that are 1 or -1
    # at the corners of the blocks and 0 elsewhere: equal corners mean equal covers, and the reverse.
    corners: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for (offsets, sizes), weight in (*((region, 1) for region in regions), (whole, -1)):
        for ends in itertools.product((False, True), repeat=len(cut)):
            corner = tuple(
                offsets[dimension] + end * sizes[dimension] for dimension, end in zip(cut, ends, strict=True)
            )
            corners[corner] += -weight if sum(ends) % 2 else weight
    return not any(corners.values())


def _overlap(one: Region, other: Region) -> bool:
    return all(
        max(start, other_start) < min(start + size, other_start + other_size)
        for start, size, other_start, other_size in zip(*one, *other, strict=True)
    )
