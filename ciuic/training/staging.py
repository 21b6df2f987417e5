"""The state at one instant, copied into an arena: all of what a save costs the training.

The layout of an arena is kept for as long as names, shapes and dtypes stay, so that a save is one copy of each tensor and little
else. What stands in the arena is the files of the snapshot as they will be restored: safetensors, `state.json`, `snapshot.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.repository.claim import Claim
from ciuic.training.layout import FileInMemory, Layout, aligned, lay_out
from ciuic.training.messages import Manifest
from ciuic.training.reading import FACTS_FILE, STATE_FILE, STATE_VERSION, Facts
from ciuic.training.structure import Leaf, pack
from ciuic.training.tensors import Array, Place
from ciuic.training.writer_client import Slot, WriterClient, files_of

VALUES: Final = "values"
"""What the manager keeps itself, as an object among the others."""
_Signature = tuple[tuple[str, tuple[tuple[str, Array], ...]], ...]


class State(NamedTuple):
    """Everything that is saved at once, of this rank. Tensors are still the trainer's own."""

    leaves: dict[str, list[Leaf]]
    document: bytes
    """`state.json`; empty where another rank stores it."""
    part: str = ""
    """What its files are called by that other ranks have too."""

    @property
    def size_bytes(self) -> int:
        return sum(leaf.array.size_bytes for leaves in self.leaves.values() for leaf in leaves)


class _Filled(NamedTuple):
    """What an arena is laid out for."""

    signature: _Signature
    layout: Layout
    places: list[Place]


def gather(
    objects: Mapping[str, Any],
    plain: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    with_shards: bool = False,
) -> State:
    """``objects``: states by name; ``plain``: values that come back under their own names. Unsaveable. Copies no tensor.

    ``with_shards``: other ranks store theirs, which `others_part` tells."""
    leaves: dict[str, list[Leaf]] = {}
    skeletons = {}
    for name, value in (*objects.items(), *plain.items(), (VALUES, dict(values))):
        packed = pack(value, name, with_shards=with_shards)
        leaves[name] = packed.leaves
        skeletons[name] = packed.skeleton
    document = {
        "version": STATE_VERSION,
        "plain": list(plain),
        "values": skeletons.pop(VALUES),
        "objects": skeletons,
    }
    return State(leaves, json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii"))


def others_part(objects: Mapping[str, Any], rank: int) -> State:
    """What a rank stores for which another one stores all that is no piece of a shared tensor. Unsaveable."""
    leaves = {}
    for name, value in objects.items():
        leaves[name] = [leaf for leaf in pack(value, name, with_shards=True).leaves if leaf.is_piece]
    return State(leaves, b"", f".rank{rank}")


def stage(
    client: WriterClient, state: State, facts: Facts, manifest: Manifest, claim: Claim | None = None
) -> int | None:
    """Copies the state into an arena and hands it to the writer; the number of the save, or None while there is no free arena.

    ``manifest``: without its files. ``claim``: for the writer. OSError (ENOMEM, no writer).
    """
    signature = tuple(
        (name, tuple((leaf.name, leaf.array) for leaf in leaves)) for name, leaves in state.leaves.items()
    )
    layout = _layout_for(client, signature, state)
    tail = _Tail(layout)
    if state.document:
        tail.add(STATE_FILE, state.document)
        tail.add(FACTS_FILE, msgspec.json.format(msgspec.json.encode(facts), indent=1))
    manifest = msgspec.structs.replace(manifest, files=files_of((*layout.files, *tail.files)))
    slot = client.reserve(tail.end + len(msgspec.msgpack.encode(manifest)))
    if slot is None:
        return None
    try:
        places = _places(slot, signature, layout)
        leaves = [leaf for of_one in state.leaves.values() for leaf in of_one]
        for place, leaf in zip(places, leaves, strict=True):
            place.fill(leaf.value)
        assert slot.arena is not None
        for offset, content in tail.content:
            slot.arena.memory[offset : offset + len(content)] = content
        return client.submit(slot, manifest, tail.end, commit=bool(state.document), claim=claim)
    finally:
        client.release(slot)


class _Tail:
    """The files behind the tensors, whose sizes change from save to save."""

    def __init__(self, layout: Layout) -> None:
        self.end = aligned(layout.size_bytes)
        self.files: list[FileInMemory] = []
        self.content: list[tuple[int, bytes]] = []

    def add(self, path: str, content: bytes) -> None:
        self.files.append(FileInMemory(path, self.end, len(content)))
        self.content.append((self.end, content))
        self.end = aligned(self.end + len(content))


def _layout_for(client: WriterClient, signature: _Signature, state: State) -> Layout:
    for slot in client.slots:
        if isinstance(slot.layout, _Filled) and slot.layout.signature == signature:
            return slot.layout.layout
    return lay_out(state.leaves, state.part)


def _places(slot: Slot, signature: _Signature, layout: Layout) -> list[Place]:
    """Where the tensors go, with the headers before them written."""
    filled = slot.layout
    if isinstance(filled, _Filled) and filled.signature == signature:
        return filled.places
    assert slot.arena is not None
    memory = slot.arena.memory
    for offset, content in layout.fixed:
        memory[offset : offset + len(content)] = content
    places = [
        Place(memory[tensor.offset : tensor.offset + tensor.array.size_bytes], tensor.array)
        for in_object in layout.tensors.values()
        for tensor in in_object
    ]
    slot.layout = _Filled(signature, layout, places)
    return places
