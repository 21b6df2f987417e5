"""Files of one rank in a checkpoint of `torch.distributed.checkpoint`, laid out in an arena.

A large shard has a safetensors file of its own, `FIRST/REST@OFFSETS.safetensors` for the tensor `FIRST.REST`
(no `@…` where the shard is the whole tensor), so that what did not change costs nothing. The small ones of a
rank share `_rank_N/small-tensors.safetensors`. Objects that are no tensors are in `_rank_N/objects.json`, by
full name; tensors inside of them are in `_rank_N_objects/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from ciuic.training.dcp.metadata import ItemLocation
from ciuic.training.format import structure, tensors
from ciuic.training.format.layout import (
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
from ciuic.training.format.structure import Leaf

OBJECTS_FILE: Final = "objects.json"
OBJECTS_VERSION: Final = 1
# The shortest header of `layout.encode_header`, which pads to multiples of 4096. A longer one (of a tensor
# with a name of thousands of characters) does not fit, and such a tensor is copied once more.
HEADER_BYTES: Final = 4096
"""Room before each tensor that `dcp.staging` places in an arena, for the header of a file of its own."""


class _Tensor(NamedTuple):
    """Tensor and its offset in the arena."""

    offset: int
    leaf: Leaf


class RankFiles:
    """Files of one rank and their places in the arena."""

    def __init__(self, rank: int, end: int = 0, staged: Mapping[int, tuple[int, int]] | None = None) -> None:
        """Begin an empty set of files.

        Args:
            rank: this rank.
            end: offset from which there is room in the arena.
            staged: tensors that are in the arena already, with room for a header before each: offset and size
                by address.
        """
        self.files: list[FileInMemory] = []
        self.places: dict[MetadataIndex, ItemLocation] = {}
        self.end = end
        self._rank = rank
        self._staged = dict(staged or {})
        self._tensors: list[_Tensor] = []
        self._content: list[tuple[int, bytes]] = []

    def add_tensors(self, items: Iterable[tuple[WriteItem, torch.Tensor]]) -> None:
        """Add tensors.

        Raises:
            Unsaveable: a tensor cannot be stored; the text names it.
        """
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

    def add_objects(self, objects: Mapping[str, Any], folder: str = "") -> None:
        """Add objects by full name.

        Args:
            objects: objects by full name.
            folder: folder of their files; by default that of the rank. Each can be used once.

        Raises:
            Unsaveable: only pickle could store an object; the text names it.
        """
        if not objects:
            return
        # Packed as `SnapshotManager` packs a state: tensors inside of objects become safetensors files.
        packed = structure.pack(dict(objects), "the state")
        folder = folder or f"_rank_{self._rank}"
        for name in objects:
            self.places[MetadataIndex(name)] = ItemLocation(folder)
        # JSON and tensors only: what pickle alone could store is refused, so that loading executes nothing.
        document = {"version": OBJECTS_VERSION, "objects": packed.skeleton}
        text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
        self._place(f"{folder}/{OBJECTS_FILE}", text, len(text))
        layout = lay_out({f"{folder}_objects": packed.leaves})
        # Laid out from 0 and moved behind the files before.
        shift = aligned(self.end)
        self.files += [file._replace(offset=file.offset + shift) for file in layout.files]
        self._content += [(offset + shift, content) for offset, content in layout.fixed]
        placed = layout.tensors[f"{folder}_objects"]
        for leaf, where in zip(packed.leaves, placed, strict=True):
            self._tensors.append(_Tensor(where.offset + shift, leaf))
        self.end = shift + layout.size_bytes

    def add_file(self, path: str, content: bytes) -> None:
        """Add a file of given content."""
        self._place(path, content, len(content))

    def fill(self, memory: memoryview) -> None:
        """Copy all content to its place in the arena."""
        for offset, content in self._content:
            memory[offset : offset + len(content)] = content
        for offset, leaf in self._tensors:
            if leaf.array.size_bytes:
                tensors.ArrayBuffer(memory[offset : offset + leaf.array.size_bytes], leaf.array).fill(
                    leaf.value
                )

    def _add_file(self, path: str, group: list[tuple[MetadataIndex, Leaf]]) -> None:
        """Add a safetensors file with these tensors."""
        header = encode_header([leaf for _, leaf in group], of_torch=True)
        size_bytes = len(header) + sum(leaf.array.size_bytes for _, leaf in group)
        width = width_of([leaf for _, leaf in group])
        # Staged by `dcp.staging` with room for the header in front: the file is complete where it stands,
        # with no second copy.
        there = self._in_place(group, header)
        if there is not None:
            self.files.append(FileInMemory(path, there, size_bytes, width))
            self._content.append((there, header))
            self.places[group[0][0]] = ItemLocation(path, len(header))
            return
        start = len(header)
        offset = self._place(path, header, size_bytes, width)
        for index, leaf in group:
            self.places[index] = ItemLocation(path, start)
            self._tensors.append(_Tensor(offset + start, leaf))
            start += leaf.array.size_bytes

    def _in_place(self, group: list[tuple[MetadataIndex, Leaf]], header: bytes) -> int | None:
        """Return the offset of the file if its only tensor was staged where it can stay; else None."""
        (_, leaf), *others = group
        if others or len(header) != HEADER_BYTES or not leaf.value.is_contiguous():
            return None
        address = leaf.value.data_ptr()
        offset, size_bytes = self._staged.get(address, (0, 0))
        if size_bytes != leaf.array.size_bytes:
            return None
        # Only once: a tensor with two names becomes two files.
        del self._staged[address]
        return offset - HEADER_BYTES

    def _place(self, path: str, start: bytes, size_bytes: int, width: int = 0) -> int:
        """Reserve room for a file and return its offset."""
        offset = aligned(self.end)
        self.files.append(FileInMemory(path, offset, size_bytes, width))
        self._content.append((offset, start))
        self.end = offset + size_bytes
        return offset


def _leaf(item: WriteItem, tensor: torch.Tensor) -> Leaf:
    """Return the tensor as a leaf of a state."""
    try:
        plain = tensors.as_plain(tensor.detach())
    except tensors.Unsaveable as error:
        raise tensors.Unsaveable(f"{item.index.fqn} is {error}") from None
    return Leaf(item.index.fqn + _offsets_of(item), plain, tensors.describe(plain))


def _path_of(item: WriteItem) -> str:
    """Return the path of the file of a large shard."""
    # One folder deep, as far as `format.files.Files` looks: a name without a dot has no folder of its own.
    first, dot, rest = item.index.fqn.partition(".")
    if not dot or not first or not rest:
        first, rest = "tensors", item.index.fqn
    folder = file_name(first).removesuffix(SUFFIX)
    return f"{folder}/{file_name(rest + _offsets_of(item))}"


def _offsets_of(item: WriteItem) -> str:
    """Return the suffix that tells a shard's offsets in its tensor; "" for a whole tensor."""
    data = item.tensor_data
    if data is None or (data.chunk.sizes == data.size):
        return ""
    return "@" + ",".join(map(str, data.chunk.offsets))
