"""Repository of training states in small blocks, stored without a writer process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from support.cli_repository import FIRST_NS, SECOND_NS, Tree, directory, store_tree

from ciuic.repository import Repository
from ciuic.training.format.layout import lay_out
from ciuic.training.format.reading import FACTS_FILE, STATE_FILE, Facts, encode_facts
from ciuic.training.format.shards import as_storable, piece_name
from ciuic.training.format.structure import Leaf, pack
from ciuic.training.format.tensors import ArrayBuffer, describe
from ciuic.types import RootRecord, SnapshotDraft, SnapshotId

BLOCK = 4096


class Sharded(NamedTuple):
    """Tensor that ranks store in pieces."""

    value: Any
    """The whole tensor, of torch."""
    pieces: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    """Offsets and shape of each piece."""


class SavedStates:
    """States of one training."""

    def __init__(self, path: Path) -> None:
        Repository.create(path, block_size=BLOCK).close()
        self.path = path
        self.count = 0

    def save(self, **objects: Mapping[str, Any]) -> SnapshotId:
        """Save objects, each a flat mapping of arrays and `Sharded`; return the id."""
        skeletons, leaves = {}, {}
        for name, state in objects.items():
            packed = pack({key: one for key, one in state.items() if not isinstance(one, Sharded)}, name)
            skeletons[name], leaves[name] = packed.skeleton, packed.leaves
            for key, one in state.items():
                if isinstance(one, Sharded):
                    dtype = str(one.value.dtype).removeprefix("torch.")
                    shape = list(one.value.shape)
                    skeletons[name][key] = {"$": "sharded", "name": key, "dtype": dtype, "shape": shape}
                    leaves[name] += [_piece(key, one.value, *piece) for piece in one.pieces]
        layout = lay_out(leaves)
        memory = bytearray(layout.end)
        layout.write_fixed(memoryview(memory))
        for name, found in layout.tensors.items():
            for leaf, where in zip(leaves[name], found, strict=True):
                size = where.array.size_bytes
                if size:
                    ArrayBuffer(memoryview(memory)[where.offset : where.offset + size], where.array).fill(
                        leaf.value
                    )
        tree: dict[bytes, Any] = {
            STATE_FILE.encode(): json.dumps(
                {"version": 1, "plain": [], "values": {}, "objects": skeletons}
            ).encode(),
            FACTS_FILE.encode(): encode_facts(Facts(step=self.count)),
        }
        for file in layout.files:
            folder, _, name = file.path.partition("/")
            content = bytes(memory[file.offset : file.offset + file.size_bytes])
            tree.setdefault(folder.encode(), {})[name.encode("utf-8", "surrogateescape")] = content
        return self.commit(tree)

    def commit(self, tree: Tree) -> SnapshotId:
        """Commit a snapshot with these files."""
        self.count += 1
        with Repository.open(self.path) as repository, repository.writer() as writer:
            draft = SnapshotDraft(
                id=SnapshotId.parse(f"cs-{self.count:06x}"),
                time_ns=FIRST_NS + self.count * SECOND_NS,
                host="testhost",
                roots=(
                    RootRecord(
                        path=b"/training",
                        entry=directory(b"", store_tree(writer, BLOCK, tree)),
                        mode="offline",
                    ),
                ),
                tags=("training",),
            )
            return writer.commit(draft).id


def rows(shape: Sequence[int], cuts: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return pieces of a tensor that is cut before these rows."""
    ends = [*cuts, shape[0]]
    starts = [0, *cuts]
    rest = tuple(shape[1:])
    return [
        ((start, *(0,) * len(rest)), (end - start, *rest))
        for start, end in zip(starts, ends, strict=True)
        if start < end
    ]


def _piece(key: str, value: Any, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Leaf:
    block = value[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]
    assert block.numel() == prod(shape)
    block = as_storable(block.contiguous())
    return Leaf(piece_name(key, offsets), block, describe(block), is_piece=True)
