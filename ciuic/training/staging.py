"""Copy the state at one instant into an arena: all of what a save costs the training.

On return, the state on the host is copied; what is on a device may still be on its way (`overlap`). The
layout of an arena is kept as long as names, shapes and dtypes stay, so that a save is one copy of each tensor
and little else. The arena holds the files of the snapshot as they will be restored: safetensors,
`state.json`, `snapshot.json`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.repository.writing.shared_write_claim import Claim
from ciuic.training.arena import Slot
from ciuic.training.device_copy import AsyncCopy, DeviceTensor, Overlap
from ciuic.training.format.layout import FileInMemory, Layout, aligned, lay_out
from ciuic.training.format.reading import FACTS_FILE, STATE_FILE, STATE_VERSION, Facts, encode_facts
from ciuic.training.format.structure import Leaf, pack
from ciuic.training.format.tensors import Array, ArrayBuffer, outside_inference_mode
from ciuic.training.json_documents import encode_json
from ciuic.training.writer.client import WriterClient, manifest_files
from ciuic.training.writer.messages import Manifest
from ciuic.training.writer.paired_files import PairRequest

VALUES: Final = "values"
"""Name under which the manager's own values are packed, as an object among the others."""
_Signature = tuple[tuple[str, tuple[tuple[str, Array], ...]], ...]
"""Names, shapes and dtypes of a state, for which a layout is valid."""


class GatheredState(NamedTuple):
    """Everything of this rank that is saved at once. Tensors still belong to the trainer."""

    leaves: dict[str, list[Leaf]]
    document: bytes
    """Content of `state.json`; empty if another rank stores it."""
    part: str = ""
    """Suffix of this rank's files whose names other ranks use too."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(leaf.array.size_bytes for leaves in self.leaves.values() for leaf in leaves)


class _SlotLayout(NamedTuple):
    """Layout that an arena was filled with, and the buffers of its tensors."""

    signature: _Signature
    layout: Layout
    places: list[ArrayBuffer]


def gather(
    objects: Mapping[str, Any],
    plain: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    with_shards: bool = False,
) -> GatheredState:
    """Gather the state of all objects without copying a tensor.

    Args:
        objects: states by name.
        plain: values that come back under their own names.
        values: values of the manager itself.
        with_shards: True if other ranks store their parts of sharded tensors (`rank_pieces`).

    Raises:
        Unsaveable: a value cannot be stored.
    """
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
    return GatheredState(leaves, encode_json(document))


def rank_pieces(objects: Mapping[str, Any], rank: int) -> GatheredState:
    """Gather only the pieces of sharded tensors, for a rank whose other state is stored by rank 0.

    Raises:
        Unsaveable: a value cannot be stored.
    """
    leaves = {}
    for name, value in objects.items():
        leaves[name] = [leaf for leaf in pack(value, name, with_shards=True).leaves if leaf.is_piece]
    # Without a document: rank 0 stores the one that all ranks share.
    return GatheredState(leaves, b"", f".rank{rank}")


class StagedSave(NamedTuple):
    """State that is in an arena, or on its way there from devices: what the writer will get."""

    number: int
    """Number of the save. Taken before the hand-over: the save is known by it while devices still copy."""
    slot: Slot
    manifest: Manifest
    manifest_offset: int
    """Offset in the arena with room for the encoded manifest."""
    commit: bool
    """True if the writer makes a snapshot of this arena; False if another rank's writer does."""
    copying: AsyncCopy | None
    """Copies from devices; None if all of the state is in the arena."""
    claim: Claim | None
    pair_request: PairRequest | None


def stage(
    client: WriterClient,
    state: GatheredState,
    facts: Facts,
    manifest: Manifest,
    overlap: Overlap,
    *,
    beside: bool,
    claim: Claim | None = None,
    request_pair: Callable[[Manifest], PairRequest] | None = None,
) -> StagedSave | None:
    """Copy the state into an arena.

    Args:
        client: client of the writer process.
        state: the gathered state.
        facts: content of `snapshot.json`.
        manifest: manifest without files.
        overlap: record of the tensors that may be copied beside the training.
        beside: True if the program may go on while devices copy.
        claim: claim on the repository, for the writer.
        request_pair: called right before the copy, once it is certain that there will be one.

    Returns:
        The staged state; None while there is no free arena.

    Raises:
        OSError: ENOMEM, or EIO if the device fails.
    """
    plan = _plan_arena(client, state, facts, manifest)
    slot = client.reserve(plan.size_bytes)
    if slot is None:
        return None
    copying = pair_request = None
    try:
        # Before the copy: the cut of the files follows 6 ms later in the median, while the state is still
        # being copied.
        pair_request = None if request_pair is None else request_pair(plan.manifest)
        assert slot.arena is not None
        with outside_inference_mode():
            items, on_host = _split_by_device(state, _places(slot, plan), overlap)
            copying = AsyncCopy(slot.arena, items, overlap, beside=beside) if items else None
            # Filled while devices copy by themselves.
            for place, value in on_host:
                place.fill(value)
        plan.tail.write_to(slot.arena.memory)
        return StagedSave(
            client.next_number(),
            slot,
            plan.manifest,
            plan.tail.end,
            # A state without its document belongs to a snapshot that another rank's writer makes.
            bool(state.document),
            copying,
            claim,
            pair_request,
        )
    # BaseException: a signal handler of the program may raise in the middle of the copy.
    except BaseException as error:
        _undo_staging(client, slot, copying, pair_request)
        # torch reports the failure of a device as a RuntimeError.
        if isinstance(error, RuntimeError):
            raise OSError(errno.EIO, f"copying the state from its device failed: {error}") from None
        raise


def _undo_staging(
    client: WriterClient, slot: Slot, copying: AsyncCopy | None, pair_request: PairRequest | None
) -> None:
    """Free the arena of a state that could not be staged."""
    if pair_request is not None:
        pair_request.close()
    if copying is not None:
        # The arena will be used again: no device may still be writing to it.
        with suppress(RuntimeError):
            copying.wait()
    client.release(slot)


def _split_by_device(
    state: GatheredState, places: list[ArrayBuffer], overlap: Overlap
) -> tuple[list[DeviceTensor], list[tuple[ArrayBuffer, Any]]]:
    """Return the tensors on devices and those on the host, each with its place in the arena."""
    items: list[DeviceTensor] = []
    on_host: list[tuple[ArrayBuffer, Any]] = []
    leaves = [(name, leaf) for name, of_one in state.leaves.items() for leaf in of_one]
    for place, (name, leaf) in zip(places, leaves, strict=True):
        # Empty tensors need no copy from a device.
        if leaf.array.size_bytes and overlap.device_stream_of(leaf.value) is not None:
            items.append(DeviceTensor(f"{name}.{leaf.name}", place, leaf.value, leaf.array.size_bytes))
        else:
            on_host.append((place, leaf.value))
    return items, on_host


class _TrailingFiles:
    """Files behind the tensors, whose sizes change from save to save."""

    def __init__(self, layout: Layout) -> None:
        self.end = aligned(layout.size_bytes)
        self.files: list[FileInMemory] = []
        self.content: list[tuple[int, bytes]] = []

    def add(self, path: str, content: bytes) -> None:
        """Append a file."""
        self.files.append(FileInMemory(path, self.end, len(content)))
        self.content.append((self.end, content))
        self.end = aligned(self.end + len(content))

    def write_to(self, memory: memoryview) -> None:
        """Write all files to an arena."""
        for offset, content in self.content:
            memory[offset : offset + len(content)] = content


class _ArenaPlan(NamedTuple):
    """Contents of an arena, known before one is reserved."""

    signature: _Signature
    layout: Layout
    """Layout of the tensors."""
    tail: _TrailingFiles
    manifest: Manifest
    """Manifest with all files."""

    @property
    def size_bytes(self) -> int:
        """Size that the arena must have: the manifest is written to it too, behind all files."""
        return self.tail.end + len(msgspec.msgpack.encode(self.manifest))


def _plan_arena(client: WriterClient, state: GatheredState, facts: Facts, manifest: Manifest) -> _ArenaPlan:
    """Lay out the files of a state and complete its manifest with them."""
    signature = tuple(
        (name, tuple((leaf.name, leaf.array) for leaf in leaves)) for name, leaves in state.leaves.items()
    )
    # Equal signatures mean equal headers and offsets.
    layout = _layout_for(client, signature, state)
    tail = _TrailingFiles(layout)
    if state.document:
        tail.add(STATE_FILE, state.document)
        tail.add(FACTS_FILE, encode_facts(facts))
    manifest = msgspec.structs.replace(manifest, files=manifest_files((*layout.files, *tail.files)))
    return _ArenaPlan(signature, layout, tail, manifest)


def _layout_for(client: WriterClient, signature: _Signature, state: GatheredState) -> Layout:
    """Return the layout of a state, from an arena that has it already if there is one."""
    for slot in client.slots:
        # The layout of an unchanged signature is kept, headers in the arena included: a save then is one copy
        # per tensor.
        if isinstance(slot.layout, _SlotLayout) and slot.layout.signature == signature:
            return slot.layout.layout
    return lay_out(state.leaves, state.part)


def _places(slot: Slot, plan: _ArenaPlan) -> list[ArrayBuffer]:
    """Return the buffers of the tensors; writes the headers before them if the arena has another layout."""
    filled = slot.layout
    if isinstance(filled, _SlotLayout) and filled.signature == plan.signature:
        return filled.places
    assert slot.arena is not None
    memory = slot.arena.memory
    for offset, content in plan.layout.fixed:
        memory[offset : offset + len(content)] = content
    places = [
        ArrayBuffer(memory[tensor.offset : tensor.offset + tensor.array.size_bytes], tensor.array)
        for in_object in plan.layout.tensors.values()
        for tensor in in_object
    ]
    slot.layout = _SlotLayout(plan.signature, plan.layout, places)
    return places
