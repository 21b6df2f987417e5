"""Files of one rank in a checkpoint of `torch.distributed.checkpoint`: laid out in an arena, stored by the rank's writer process.

A large shard has a safetensors file of its own, `FIRST/REST@OFFSETS.safetensors` for the tensor `FIRST.REST`
(no `@…` where the shard is the whole tensor), so that what did not change costs nothing. The small ones of a
rank share `_rank_N/small-tensors.safetensors`. Objects that are no tensors are in `_rank_N/objects.json`, by
full name; tensors inside of them are in `_rank_N_objects/`.

Ranks store in turn, then one makes a snapshot of all parts. Guarantees: what `PartsWriter.store` returned is durable; a
snapshot exists when `commit` returned, and not before; while a rank holds a claim nothing that was stored is swept.

References:
    docs/decisions/ranks-in-turn.md
"""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from ciuic.repository import Repository
from ciuic.repository.locks import Claim
from ciuic.training.arena import Arena
from ciuic.training.dcp.metadata import ItemLocation
from ciuic.training.device_copy import DeviceStream, device_stream_of
from ciuic.training.format import structure, tensors
from ciuic.training.format.layout import (
    OWN_FILE_BYTES,
    SMALL_FILE,
    SUFFIX,
    Layout,
    aligned,
    encode_header,
    file_name,
    packing_order,
)
from ciuic.training.format.shards import map_leaves, piece_name, with_local
from ciuic.training.format.structure import Leaf
from ciuic.training.logs import log
from ciuic.training.remote.copies import RemoteCopies
from ciuic.training.remote.place import RemoteList, uploads_of
from ciuic.training.rules import Latest
from ciuic.training.writer.client import LOST_WRITER, Slot, WriterClient, manifest_files
from ciuic.training.writer.messages import (
    COMPRESSIONS,
    Begin,
    FromWriter,
    Manifest,
    Measured,
    Note,
    NotSaved,
    PreemptionNotice,
    Put,
    RetentionRules,
    Saved,
    StoredFile,
    StoredFiles,
)

OBJECTS_FILE: Final = "objects.json"
OBJECTS_VERSION: Final = 1
# The shortest header of `layout.encode_header`, which pads to multiples of 4096. A longer one (of a tensor
# with a name of thousands of characters) does not fit, and such a tensor is copied once more.
HEADER_BYTES: Final = 4096
"""Room before each tensor that `ArenaPlacer` places in an arena, for the header of a file of its own."""


class RankFiles(Layout):
    """Files of one rank and their places in the arena."""

    def __init__(self, rank: int, end: int = 0, staged: Mapping[int, tuple[int, int]] | None = None) -> None:
        """Begin an empty set of files.

        Args:
            rank: this rank.
            end: offset from which there is room in the arena.
            staged: tensors that are in the arena already, with room for a header before each: offset and size
                by address.
        """
        super().__init__(end)
        self.places: dict[MetadataIndex, ItemLocation] = {}
        self._rank = rank
        self._staged = dict(staged or {})
        self._to_fill: list[tuple[int, Leaf]] = []
        """Tensors and their offsets in the arena."""

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
            small.sort(key=lambda one: packing_order(one[1]))
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
        self.add_file(f"{folder}/{OBJECTS_FILE}", text)
        beside = f"{folder}_objects"
        self.add_object(beside, packed.leaves)
        self._to_fill += zip((one.offset for one in self.tensors[beside]), packed.leaves, strict=True)

    def fill(self, memory: memoryview) -> None:
        """Copy all content to its place in the arena."""
        self.write_fixed(memory)
        for offset, leaf in self._to_fill:
            if leaf.array.size_bytes:
                tensors.ArrayBuffer(memory[offset : offset + leaf.array.size_bytes], leaf.array).fill(
                    leaf.value
                )

    def _add_file(self, path: str, group: list[tuple[MetadataIndex, Leaf]]) -> None:
        """Add a safetensors file with these tensors."""
        leaves = [leaf for _, leaf in group]
        header = encode_header(leaves, of_torch=True)
        # Staged by `ArenaPlacer` with room for the header in front: the file is complete where it stands,
        # with no second copy.
        there = self._in_place(group, header)
        offsets = self.add_tensor_file(path, header, leaves, there)
        if there is None:
            self._to_fill += zip(offsets, leaves, strict=True)
        for (index, _), offset in zip(group, offsets, strict=True):
            self.places[index] = ItemLocation(path, len(header) + offset - offsets[0])

    def _in_place(self, group: list[tuple[MetadataIndex, Leaf]], header: bytes) -> int | None:
        """Return the offset of the file if its only tensor was staged where it can stay; else None."""
        (_, leaf), *others = group
        if others or len(header) != HEADER_BYTES or not leaf.value.is_contiguous():
            return None
        address = leaf.value.data_ptr()
        placed = self._staged.get(address)
        if placed is None or placed[1] != leaf.array.size_bytes:
            return None
        # Only once: a tensor with two names becomes two files.
        del self._staged[address]
        return placed[0] - HEADER_BYTES


def _leaf(item: WriteItem, tensor: torch.Tensor) -> Leaf:
    try:
        plain = tensors.as_plain(tensor.detach())
    except tensors.Unsaveable as error:
        raise tensors.Unsaveable(f"{item.index.fqn} is {error}") from None
    return Leaf(_name_of(item.index.fqn, item), plain, tensors.describe(plain))


def _path_of(item: WriteItem) -> str:
    """Return the path of the file of a large shard."""
    # One folder deep, as far as `stored_files.Files` looks: a name without a dot has no folder of its own.
    first, dot, rest = item.index.fqn.partition(".")
    if not dot or not first or not rest:
        first, rest = "tensors", item.index.fqn
    folder = file_name(first).removesuffix(SUFFIX)
    return f"{folder}/{file_name(_name_of(rest, item))}"


def _name_of(tensor: str, item: WriteItem) -> str:
    """Return the name of a tensor, or that of a piece if the item is not all of it."""
    data = item.tensor_data
    return tensor if data is None or data.chunk.sizes == data.size else piece_name(tensor, data.chunk.offsets)


_STATES: Final = slice(0, 2)
"""Arenas for states and parts of states."""
# Arena of the final commit; separate from `_STATES`, so that the end of one save does not wait for the start
# of others.
_METADATA: Final = slice(2, 3)
_POLL_SECONDS: Final = 0.005
"""Pause between two looks at the writer's messages."""
_CLOSE_SECONDS: Final = 120.0
"""Longest time for which `close` waits for the writer."""


loaded_ns: Final[dict[bytes, int]] = {}
"""Time of the newest snapshot on a remote that this process was to load, by the root of the run.

What it saves then is later, also where its clock is behind that of the host that has saved the other.
"""


class PartsWriter:
    """Writer process of one rank, for parts of snapshots and for the snapshots themselves."""

    def __init__(
        self,
        save_dir: Path,
        name: str,
        max_snapshots: int | None,
        nice: int,
        compression: str,
        remotes: RemoteList = (),
    ) -> None:
        """Open the repository, or create one; the writer process starts with the first part.

        Args:
            save_dir: directory of the repository.
            name: name of the run.
            max_snapshots: number of newest snapshots that stay; None keeps all.
            nice: niceness of the writer process.
            compression: one of `COMPRESSIONS`.
            remotes: remotes to which the writer process has snapshots uploaded.

        Raises:
            ValueError: an option is out of its range.
            CiuicError: there can be no repository at ``save_dir``.
            OSError: the same, as the file system says it.
        """
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}")
        uploads = uploads_of(save_dir, remotes)
        self.save_dir = save_dir
        rules = RetentionRules(keep=() if max_snapshots is None else (Latest(max_snapshots),))
        self.root = os.fsencode(f"/{name}")
        """Path of the run in its snapshots."""
        begin = Begin(
            repository=str(save_dir),
            root=self.root,
            rules=rules,
            nice=nice,
            compression=compression,
            uploads=uploads,
        )
        self.copies = RemoteCopies(str(save_dir), uploads)
        # Two for states and one for the commit (`_STATES`, `_METADATA`).
        self._client = WriterClient(begin, arenas=3, small_arenas=0)
        # A save writes on a thread of its own while the training stages the next state.
        self.lock = threading.RLock()
        self._answers: dict[int, list[FromWriter]] = {}
        self._claim: Claim | None = None

    def claim(self) -> None:
        """Let nothing be swept until `release`, in place of an earlier claim."""
        self.release()
        # Until the commit no snapshot refers to what the ranks store, and a prune would free it.
        with Repository.open(self.save_dir) as repository:
            self._claim = repository.claim()

    def release(self) -> None:
        """Release the claim, if there is one."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def free_slot(self, size_bytes: int, among: slice = _STATES) -> Slot | None:
        """Wait for a free arena; None if staged states hold all and nothing is being written.

        Call it with the lock held.
        """
        while (slot := self._client.free_slot(size_bytes, among)) is None and self._client.pending:
            self._hear()
            time.sleep(_POLL_SECONDS)
        return slot

    def begin(self, part: RankFiles, slot: Slot | None = None) -> int:
        """Copy a part into an arena and hand it over.

        Args:
            part: files of the part.
            slot: arena that has some of them already; None for a free one.

        Returns:
            The number to `wait_stored` for.

        Raises:
            OSError: there is no memory, or no writer.
        """
        with self.lock:
            return self._submit(part, _manifest(part, "", (), ()), slot, commit=False)

    def wait_stored(self, number: int) -> tuple[StoredFile, ...]:
        """Wait until a part is durable and return its files.

        Raises:
            OSError: it was not stored.
        """
        answers = self._wait(number)
        return tuple(file for one in answers if isinstance(one, StoredFiles) for file in one.files)

    def commit(
        self, part: RankFiles, stored: Sequence[StoredFile], message: str, tags: tuple[str, ...]
    ) -> str:
        """Make the snapshot of all ranks' stored files and the files of a last part; return its id.

        Raises:
            OSError: there is no snapshot.
        """
        manifest = _manifest(part, message, tags, stored, loaded_ns.get(self.root, 0) + 1)
        with self.lock:
            number = self._submit(part, manifest, None, commit=True)
        return next((str(one.id) for one in self._wait(number) if isinstance(one, Saved)), "")

    def close(self) -> None:
        """Release the claim, wait for the writer process and let it end."""
        self.release()
        with self.lock:
            self._client.close(_CLOSE_SECONDS)

    # -- inside

    def _submit(self, part: RankFiles, manifest: Manifest, slot: Slot | None, *, commit: bool) -> int:
        if slot is None:
            slot = self.free_slot(_needed(part, manifest), _METADATA if commit else _STATES)
            if slot is None:
                raise OSError("both arenas hold states that were staged and are not being saved")
            slot.layout = None
        assert slot.arena is not None
        part.fill(slot.arena.memory)
        number = self._client.submit(slot, manifest, part.end, commit=commit)
        self._answers[number] = []
        return number

    def _wait(self, number: int) -> list[FromWriter]:
        """Wait for the answer to a save and return all messages about it.

        Raises:
            OSError: it was not saved.
        """
        while True:
            with self.lock:
                self._hear()
                answers = self._answers[number]
                if answers and isinstance(answers[-1], (Saved, NotSaved, Put)):
                    del self._answers[number]
                    break
            # Outside of the lock: the training may stage the next state meanwhile.
            time.sleep(_POLL_SECONDS)
        if isinstance(answers[-1], NotSaved):
            raise OSError(f"not saved: {answers[-1].reason}")
        return answers

    def _hear(self) -> None:
        for message in self._client.poll():
            if isinstance(message, Note):
                # A lost writer is reported by the saves that it failed.
                if message.event != LOST_WRITER:
                    log.warning("ciuic: %s", message.text)
            elif not isinstance(message, (PreemptionNotice, Measured)) and message.number in self._answers:
                self._answers[message.number].append(message)


def fits(slot: Slot, part: RankFiles) -> bool:
    """Return whether the files of a part, and what is said of them, fit into the slot's arena."""
    return slot.arena is not None and _needed(part, _manifest(part, "", (), ())) <= slot.arena.size_bytes


def _manifest(
    part: RankFiles, message: str, tags: tuple[str, ...], stored: Sequence[StoredFile], from_ns: int = 0
) -> Manifest:
    return Manifest(
        time_ns=max(time.time_ns(), from_ns),
        message=message,
        tags=tags,
        files=manifest_files(part.files),
        stored=list(stored),
    )


def _needed(part: RankFiles, manifest: Manifest) -> int:
    """Return the bytes of arena that the files and the manifest take."""
    return part.end + len(msgspec.msgpack.encode(manifest))


# torch views bytes as another dtype only from a multiple of its element size, which is 16 bytes at most.
_SMALL_ALIGNMENT: Final = 64
"""Alignment of tensors that will be copied once more, into the file that they share."""
_CopyTensor = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns a copy of a tensor on the CPU."""


def copy_state(state: Any, place: _CopyTensor, *, objects: bool = True) -> Any:
    """Return a copy of the state. A tensor that occurs several times is copied once.

    Args:
        state: The state.
        place: Copies plain dense tensors, and the local tensors of DTensors.
        objects: Whether other values are copied too.
    """
    made: dict[int, tuple[Any, Any]] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, DTensor):
            return with_local(value, copied(value._local_tensor))
        dense = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        # Other kinds of tensors are copied by their own method.
        if not dense or value.is_quantized or value.is_meta:
            return copy.deepcopy(value) if objects else value
        return place(value)

    def leaf(value: Any, _: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return copied(value)
        # The original is kept with its copy: an id is unique only among objects that live.
        if id(value) not in made:
            made[id(value)] = value, copied(value)
        return made[id(value)][1]

    return map_leaves(state, leaf)


def arena_bytes(state: Any) -> int:
    """Return the size of the arena in which `ArenaPlacer` has room for the state."""
    total = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = _reserved(total, tensor)[1]
        return tensor

    # Sizes only: other objects need no arena, and a deep copy of them would be dropped.
    copy_state(state, count, objects=False)
    return total


class ArenaPlacer:
    """Copy tensors into an arena, one behind the other. The copies keep its memory alive."""

    def __init__(self, memory: memoryview, arena: Arena | None = None) -> None:
        """Begin with an empty arena.

        Args:
            memory: memory of the arena.
            arena: the arena; None if devices have to copy synchronously.
        """
        self.end = 0
        self._arena = arena
        self._lanes: list[DeviceStream] = []
        self.starts: dict[int, tuple[int, int]] = {}
        """Tensors with room for a header before them: offset and size by address."""
        self._room = torch.frombuffer(memory, dtype=torch.uint8)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy one tensor; a copy from a device is complete after `wait`."""
        start, self.end = _reserved(self.end, tensor)
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        size_bytes = tensor.numel() * tensor.element_size()
        there = self._room[start : start + size_bytes].view(tensor.dtype).view(tensor.shape)
        lane = device_stream_of(tensor) if self._arena is not None else None
        if lane is not None and self._arena is not None:
            if lane not in self._lanes:
                self._lanes.append(lane)
                # The kernels that compute the state may still be queued on the program's stream.
                lane.follow()
            lane.copy(self._arena, there, tensor)
        else:
            there.copy_(tensor.detach())
        # Only large tensors get files of their own and can stay where they are.
        if size_bytes >= OWN_FILE_BYTES:
            self.starts[there.data_ptr()] = start, size_bytes
        return there

    def wait(self) -> None:
        """Wait for copies from devices, also after an error: the memory may then be used again."""
        for lane in self._lanes:
            lane.mark().wait()


def copy_to_heap(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy outside of any arena."""
    return tensor.detach().to("cpu", copy=True)


def _reserved(end: int, tensor: torch.Tensor) -> tuple[int, int]:
    """Return start and end of the tensor in an arena that is filled up to `end`."""
    size_bytes = tensor.numel() * tensor.element_size()
    # A small one will be copied once more, into the file that they share.
    small = size_bytes < OWN_FILE_BYTES
    start = -(-end // _SMALL_ALIGNMENT) * _SMALL_ALIGNMENT if small else aligned(end) + HEADER_BYTES
    return start, start + size_bytes
