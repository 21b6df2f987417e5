"""Tensors that a snapshot holds in pieces, each read as far as somebody needs it.

Guarantees: what is read was checked; a tensor whose pieces do not make up the whole of it is damaged, found when the snapshot is opened.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ciuic.errors import Damaged
from ciuic.repository import Repository
from ciuic.training.files import Files, Opened, read_file
from ciuic.training.layout import TensorInFile
from ciuic.training.tensors import empty_buffer


class Piece(NamedTuple):
    offsets: tuple[int, ...]
    """In the whole tensor."""
    path: str
    """Of the file."""
    where: TensorInFile


class Source:
    """Reads ranges of the files of one snapshot. For several threads, each of which opens the repository once."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._own = threading.local()
        self._all: list[Repository] = []

    def close(self) -> None:
        for repository in self._all:
            repository.close()

    def read(self, path: str, start: int, size_bytes: int) -> Any:
        """A torch tensor of bytes. Damaged."""
        repository, files = self._of_thread()
        entry = files.entry(path)
        block_size = repository.block_size
        first = start // block_size
        stop = min(-(-(start + size_bytes) // block_size) * block_size, entry.size_bytes)
        if start + size_bytes > entry.size_bytes:
            raise Damaged(f"{path} is shorter than it was")
        room, memory = empty_buffer(stop - first * block_size)
        read_file(repository, entry, memory, first)
        begin = start - first * block_size
        return room[begin : begin + size_bytes]

    def _of_thread(self) -> tuple[Repository, Files]:
        if not hasattr(self._own, "files"):
            repository = Repository.open(self._opened.path)
            self._all.append(repository)
            self._own.files = repository, self._opened.files(repository)
        return self._own.files  # type: ignore[no-any-return]


class InPieces:
    """One tensor. `shards.Whole`."""

    def __init__(self, name: str, said: Mapping[str, Any], pieces: Sequence[Piece], source: Source) -> None:
        """``said``: what stands for it in `state.json`. Damaged; ValueError."""
        import torch

        self.shape = tuple(int(one) for one in said["shape"])
        # Ranks that share no mesh (FSDP2 within tensor parallel groups) may each have stored what is the same on all of them.
        self._pieces, self._source = list({piece.offsets: piece for piece in pieces}.values()), source
        dtype = getattr(torch, said["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this torch has no dtype {said['dtype']}")
        self._dtype = dtype
        here = 0
        for piece in self._pieces:
            sizes = self._sizes(piece)
            inside = len(sizes) == len(self.shape) == len(piece.offsets) and all(
                offset + size <= whole
                for offset, size, whole in zip(piece.offsets, sizes, self.shape, strict=True)
            )
            here += prod(sizes) if inside else -1
        if here != prod(self.shape):
            raise Damaged(f"of the tensor {name} there are {max(0, here)} elements of {prod(self.shape)}")

    def read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        """A block of it, as a torch tensor on the CPU. Damaged."""
        import torch

        block = torch.empty(sizes, dtype=self._dtype)
        if not block.numel():
            return block
        for piece in self._pieces:
            its = self._sizes(piece)
            low = [max(one, other) for one, other in zip(offsets, piece.offsets, strict=True)]
            high = [
                min(one + size, other + its_size)
                for one, size, other, its_size in zip(offsets, sizes, piece.offsets, its, strict=True)
            ]
            if any(start >= stop for start, stop in zip(low, high, strict=True)):
                continue
            target, found = block, self._rows(piece, its, low, high)
            for dimension, (start, stop) in enumerate(zip(low, high, strict=True)):
                target = target.narrow(dimension, start - offsets[dimension], stop - start)
                if dimension:
                    found = found.narrow(dimension, start - piece.offsets[dimension], stop - start)
            target.copy_(found)
        return block

    def whole(self) -> Any:
        return self.read((0,) * len(self.shape), self.shape)

    def _rows(self, piece: Piece, its: tuple[int, ...], low: list[int], high: list[int]) -> Any:
        """Of a piece, cut along the first dimension alone."""
        number, row_bytes = 1, self._dtype.itemsize
        start = piece.where.start
        shape: tuple[int, ...] = ()
        if its:
            number, row_bytes = high[0] - low[0], prod(its[1:]) * self._dtype.itemsize
            start += (low[0] - piece.offsets[0]) * row_bytes
            shape = (number, *its[1:])
        data = self._source.read(piece.path, start, number * row_bytes)
        if data.storage_offset() % self._dtype.itemsize:
            data = data.clone()  # a view of another dtype must begin at a multiple of its size
        return data.view(self._dtype).view(shape)

    def _sizes(self, piece: Piece) -> tuple[int, ...]:
        """A dtype without a name in safetensors is stored as a run of bytes."""
        sizes = piece.where.shape
        if piece.where.dtype == "U8" and sizes:
            return (*sizes[:-1], sizes[-1] // self._dtype.itemsize)
        return sizes
