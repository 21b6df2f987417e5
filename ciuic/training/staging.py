"""The state at one instant, copied into an arena: all of what a save costs the training.

What is on the host is copied on return, what is on a device may still be on its way (`overlap`). The layout of an arena is kept for as long as names, shapes and dtypes stay, so that a save is one copy of each tensor and little
else. What stands in the arena is the files of the snapshot as they will be restored: safetensors, `state.json`, `snapshot.json`.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.repository.claim import Claim
from ciuic.training.filesystem import Asked
from ciuic.training.layout import FileInMemory, Layout, aligned, lay_out
from ciuic.training.messages import Manifest
from ciuic.training.overlap import Copying, Item, Overlap
from ciuic.training.reading import FACTS_FILE, STATE_FILE, STATE_VERSION, Facts
from ciuic.training.structure import Leaf, pack
from ciuic.training.tensors import Array, Place, normally
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


class Staged:
    """A state that is in an arena, or on its way there from devices."""

    def __init__(
        self,
        client: WriterClient,
        slot: Slot,
        manifest: Manifest,
        end: int,
        *,
        commit: bool,
        copying: Copying | None,
        claim: Claim | None,
        asked: Asked | None,
    ) -> None:
        self.number = client.next_number()
        """Of the save."""
        self.copying = copying
        """None: all of it is there."""
        self._client = client
        self._slot = slot
        self._manifest = manifest
        self._end = end
        self._commit = commit
        self._claim = claim
        self._asked = asked

    def hand_over(self) -> None:
        """To the writer: nothing is on its way any more. OSError (no writer)."""
        self._client.submit(
            self._slot,
            self._manifest,
            self._end,
            commit=self._commit,
            claim=self._claim,
            asked=self._asked,
            number=self.number,
        )
        self._let_go()

    def give_up(self) -> None:
        """There will be no such save."""
        self._client.release(self._slot)
        self._let_go()

    def _let_go(self) -> None:
        if self._asked is not None:
            self._asked.close()


def stage(
    client: WriterClient,
    state: State,
    facts: Facts,
    manifest: Manifest,
    overlap: Overlap,
    *,
    beside: bool,
    claim: Claim | None = None,
    at_instant: Callable[[Manifest], Asked] | None = None,
) -> Staged | None:
    """Copies the state into an arena; None while there is no free one. ``manifest``: without its files. ``beside``: what the program
    does next may go on beside the copy from devices. ``claim``: for the writer. ``at_instant``: called when it is sure that
    the state will be copied, and before. OSError (ENOMEM, the device refuses)."""
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
    copying = asked = None
    try:
        asked = None if at_instant is None else at_instant(manifest)
        assert slot.arena is not None
        with normally():
            items, on_host = _by_place(state, _places(slot, signature, layout), overlap)
            copying = Copying(slot.arena, items, overlap, beside=beside) if items else None
            for place, value in on_host:  # while devices copy by themselves
                place.fill(value)
        for offset, content in tail.content:
            slot.arena.memory[offset : offset + len(content)] = content
        return Staged(
            client,
            slot,
            manifest,
            tail.end,
            commit=bool(state.document),
            copying=copying,
            claim=claim,
            asked=asked,
        )
    except BaseException as error:
        if asked is not None:
            asked.close()
        if copying is not None:
            with suppress(RuntimeError):  # nothing may be written there any more when it is used again
                copying.wait()
        client.release(slot)
        if isinstance(error, RuntimeError):
            raise OSError(errno.EIO, f"the state cannot be copied from its device: {error}") from None
        raise


def _by_place(
    state: State, places: list[Place], overlap: Overlap
) -> tuple[list[Item], list[tuple[Place, Any]]]:
    """What is on devices, and what is on the host."""
    items: list[Item] = []
    on_host: list[tuple[Place, Any]] = []
    leaves = [(name, leaf) for name, of_one in state.leaves.items() for leaf in of_one]
    for place, (name, leaf) in zip(places, leaves, strict=True):
        if leaf.array.size_bytes and overlap.lane_of(leaf.value) is not None:
            items.append(Item(f"{name}.{leaf.name}", place, leaf.value, leaf.array.size_bytes))
        else:
            on_host.append((place, leaf.value))
    return items, on_host


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
