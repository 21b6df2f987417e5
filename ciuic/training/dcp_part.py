"""One rank's part of a checkpoint of `torch.distributed.checkpoint`, as files that stand in an arena.

A large shard has a safetensors file of its own, `FIRST/REST@OFFSETS.safetensors` for the tensor `FIRST.REST` (no `@…` where the shard
is the whole tensor), so that what did not change costs nothing. The small ones of a rank share `_rank_N/small-tensors.safetensors`.
What is no tensor is in `_rank_N/objects.json`, by full name, with the tensors inside it beside it in `_rank_N_objects/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from ciuic.training import structure, tensors
from ciuic.training.dcp_metadata import Place
from ciuic.training.layout import (
    OWN_FILE_BYTES,
    SMALL_FILE,
    SUFFIX,
    FileInMemory,
    aligned,
    encode_header,
    file_name,
    lay_out,
    width_of,
)
from ciuic.training.structure import Leaf

OBJECTS_FILE: Final = "objects.json"
OBJECTS_VERSION: Final = 1
HEADER_BYTES: Final = 4096
"""Before each tensor that `dcp_staging` puts into an arena there is so much room, for the header of a file of its own."""


class _Tensor(NamedTuple):
    offset: int
    leaf: Leaf


class Part:
    """What is to stand in the arena; offsets in it are from 0 on, or behind what was staged there before."""

    def __init__(self, rank: int, end: int = 0, staged: Mapping[int, tuple[int, int]] | None = None) -> None:
        """``staged``: tensors that stand in the arena already, with room for a header before each: by address, offset and size.
        ``end``: from where on there is room for more."""
        self.files: list[FileInMemory] = []
        self.places: dict[MetadataIndex, Place] = {}
        self.end = end
        self._rank = rank
        self._staged = dict(staged or {})
        self._tensors: list[_Tensor] = []
        self._content: list[tuple[int, bytes]] = []

    def add_tensors(self, items: Iterable[tuple[WriteItem, torch.Tensor]]) -> None:
        """Unsaveable names the tensor that cannot be stored."""
        small: list[tuple[MetadataIndex, Leaf]] = []
        for item, tensor in items:
            leaf = _leaf(item, tensor)
            if leaf.array.size_bytes < OWN_FILE_BYTES:
                small.append((item.index, leaf))
            else:
                self._add_file(_path_of(item), [(item.index, leaf)])
        if small:
            # Wide elements first: each then lies at a multiple of its size, without gaps.
            small.sort(key=lambda one: (-one[1].array.element_bytes, one[1].name))
            self._add_file(f"_rank_{self._rank}/{SMALL_FILE}{SUFFIX}", small)

    def add_objects(self, objects: Mapping[str, Any]) -> None:
        """By full name. Unsaveable names what only pickle could store."""
        if not objects:
            return
        packed = structure.pack(dict(objects), "the state")
        folder = f"_rank_{self._rank}"
        for name in objects:
            self.places[MetadataIndex(name)] = Place(folder)
        document = {"version": OBJECTS_VERSION, "objects": packed.skeleton}
        text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
        self._place(f"{folder}/{OBJECTS_FILE}", text, len(text))
        layout = lay_out({f"{folder}_objects": packed.leaves})
        shift = aligned(self.end)
        self.files += [file._replace(offset=file.offset + shift) for file in layout.files]
        self._content += [(offset + shift, content) for offset, content in layout.fixed]
        placed = layout.tensors[f"{folder}_objects"]
        for leaf, where in zip(packed.leaves, placed, strict=True):
            self._tensors.append(_Tensor(where.offset + shift, leaf))
        self.end = shift + layout.size_bytes

    def add_file(self, path: str, content: bytes) -> None:
        self._place(path, content, len(content))

    def fill(self, memory: memoryview) -> None:
        """Copies everything to where it is to stand."""
        for offset, content in self._content:
            memory[offset : offset + len(content)] = content
        for offset, leaf in self._tensors:
            if leaf.array.size_bytes:
                tensors.Place(memory[offset : offset + leaf.array.size_bytes], leaf.array).fill(leaf.value)

    def _add_file(self, path: str, group: list[tuple[MetadataIndex, Leaf]]) -> None:
        header = encode_header([leaf for _, leaf in group], of_torch=True)
        size_bytes = len(header) + sum(leaf.array.size_bytes for _, leaf in group)
        width = width_of([leaf for _, leaf in group])
        there = self._in_place(group, header)
        if there is not None:
            self.files.append(FileInMemory(path, there, size_bytes, width))
            self._content.append((there, header))
            self.places[group[0][0]] = Place(path, len(header))
            return
        start = len(header)
        offset = self._place(path, header, size_bytes, width)
        for index, leaf in group:
            self.places[index] = Place(path, start)
            self._tensors.append(_Tensor(offset + start, leaf))
            start += leaf.array.size_bytes

    def _in_place(self, group: list[tuple[MetadataIndex, Leaf]], header: bytes) -> int | None:
        """Where the file stands, if its only tensor was staged where it can stay."""
        (_, leaf), *others = group
        if others or len(header) != HEADER_BYTES or not leaf.value.is_contiguous():
            return None
        address = leaf.value.data_ptr()
        offset, size_bytes = self._staged.get(address, (0, 0))
        if size_bytes != leaf.array.size_bytes:
            return None
        del self._staged[address]  # a tensor of two names is two files
        return offset - HEADER_BYTES

    def _place(self, path: str, start: bytes, size_bytes: int, width: int = 0) -> int:
        offset = aligned(self.end)
        self.files.append(FileInMemory(path, offset, size_bytes, width))
        self._content.append((offset, start))
        self.end = offset + size_bytes
        return offset


def _leaf(item: WriteItem, tensor: torch.Tensor) -> Leaf:
    try:
        plain = tensors.as_plain(tensor.detach())
    except tensors.Unsaveable as error:
        raise tensors.Unsaveable(f"{item.index.fqn} is {error}") from None
    return Leaf(item.index.fqn + _offsets_of(item), plain, tensors.describe(plain))


def _path_of(item: WriteItem) -> str:
    first, dot, rest = item.index.fqn.partition(".")
    if not dot or not first or not rest:
        first, rest = "tensors", item.index.fqn
    folder = file_name(first).removesuffix(SUFFIX)
    return f"{folder}/{file_name(rest + _offsets_of(item))}"


def _offsets_of(item: WriteItem) -> str:
    """Of a shard in its tensor."""
    data = item.tensor_data
    if data is None or (data.chunk.sizes == data.size):
        return ""
    return "@" + ",".join(map(str, data.chunk.offsets))
