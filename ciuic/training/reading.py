"""A trainer's state out of the repository, checked, and the search for the newest good one.

Guarantees: every byte that becomes part of a state was read with its checksum; nothing that is stored is executed; a snapshot that is
damaged or incomplete is passed over with its reason, never handed out in part. Needs no writer, no daemon and no lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.repository import DamagedChunk, Repository, SnapshotInfo, Walker
from ciuic.repository.blockmaps import blocks_of
from ciuic.training import structure, tensors
from ciuic.training.layout import SUFFIX, TensorInFile, decode_header
from ciuic.types import ChunkId, Entry, SnapshotId

STATE_FILE: Final = "state.json"
FACTS_FILE: Final = "snapshot.json"
STATE_VERSION: Final = 1
_AT_ONCE: Final = 32
_THREADS: Final = 4


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`snapshot.json`: what can be known of a snapshot without reading its state. Unknown fields are ignored."""

    version: int = STATE_VERSION
    step: int | None = None
    """Optimizer steps since the run began, restarts included."""
    epoch: int | None = None
    metrics: dict[str, float] = {}
    reason: str = ""
    """Why it was taken."""
    objects: tuple[str, ...] = ()
    size_bytes: int = 0
    """Of all tensors."""
    run: str = ""
    """32 hexadecimal digits that all snapshots of a run share, resumed or not."""
    rank: int = 0
    world_size: int = 1
    framework: dict[str, str] = {}
    """Versions: python, torch, …"""


class SavedSnapshot(NamedTuple):
    """One line of `SnapshotManager.list_snapshots`."""

    id: str
    time_ns: int
    facts: Facts
    tags: tuple[str, ...]
    held: bool
    size_bytes: int
    new_bytes: int
    """By which the repository grew."""


class PassedOver(NamedTuple):
    """A snapshot that was newer than the one that was loaded, and why it was not."""

    id: str
    reason: str


@dataclass
class Loaded:
    """What a snapshot holds, and how it was found."""

    id: str
    facts: Facts
    objects: dict[str, Any]
    """By the names under which they were registered; their states as `state_dict` gave them, tensors on the CPU."""
    values: dict[str, Any] = field(default_factory=dict)
    """What the manager keeps itself: random generators, positions."""
    passed_over: list[PassedOver] = field(default_factory=list)


def saved_snapshots(repository: Repository, root: bytes | None) -> list[SavedSnapshot]:
    """Newest first; those that cannot be read are left out (`newest_good` names them)."""
    found = []
    for info in repository.snapshots.list(root=root):
        try:
            found.append(_saved(info, read_facts(repository, info.id)))
        except (CiuicError, ValueError):
            continue
    return found


def newest_good(path: str, candidates: Sequence[SavedSnapshot | SnapshotInfo]) -> Loaded | None:
    """The first of them that can be read whole, with what was passed over; None if there are none. NothingGood if none can."""
    passed_over: list[PassedOver] = []
    for candidate in candidates:
        try:
            loaded = load(path, candidate.id)
        except (CiuicError, ValueError) as error:
            passed_over.append(PassedOver(candidate.id, str(error)))
            continue
        loaded.passed_over = passed_over
        return loaded
    if passed_over:
        raise NothingGood(passed_over)
    return None


class NothingGood(Damaged):
    """There are snapshots, and none can be read whole."""

    def __init__(self, passed_over: list[PassedOver]) -> None:
        reasons = "; ".join(f"{id_}: {reason}" for id_, reason in passed_over)
        super().__init__(f"no snapshot can be read whole: {reasons}", hint="ciuic --repo DIR check")
        self.passed_over = passed_over


def damaged_chunks(repository: Repository, id_: SnapshotId) -> list[ChunkId]:
    """Those of a snapshot of which no good copy can be read. Reads all of it; [] also where its own file is what is damaged."""
    bad: list[ChunkId] = []
    try:
        snapshot = repository.snapshots.load(id_)
    except CiuicError:
        return bad
    for reached in Walker(repository).walk(snapshot, on_damage=lambda reached, _: bad.append(reached.id)):
        if reached.kind == "data":
            try:
                repository.chunks.get(reached.id)
            except DamagedChunk:
                bad.append(reached.id)
    return bad


def load(path: str, id_: str) -> Loaded:
    """The state in one snapshot. NotFound; Damaged where anything of it is not as it was saved; ValueError where this version, or
    this version of the framework, does not know what was saved."""
    with Repository.open(path) as repository:
        snapshot = repository.snapshots.load(SnapshotId.parse(id_))
        files = Files(repository, top_of(snapshot.roots[0].entry if snapshot.roots else None, id_))
        facts = _decode_facts(files.read(FACTS_FILE))
        state = json.loads(files.read(STATE_FILE))
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"{id_} was written by a later version of ciuic")
        arrays = arrays_of(path, files, [name for name in files.names() if name.endswith(SUFFIX)])
        objects = {
            name: structure.unpack(skeleton, arrays.lookup(name))
            for name, skeleton in state["objects"].items()
        }
        values = structure.unpack(state["values"], arrays.lookup("values"))
        return Loaded(id_, facts, objects, values)


def top_of(entry: Entry | None, id_: str) -> Entry:
    """The directory that holds a state. NotFound."""
    if entry is None:
        raise NotFound(f"{id_} holds no training state")
    return entry


def read_facts(repository: Repository, id_: SnapshotId) -> Facts:
    snapshot = repository.snapshots.load(id_)
    return _decode_facts(Files(repository, top_of(snapshot.roots[0].entry, id_)).read(FACTS_FILE))


def _decode_facts(data: bytes | bytearray) -> Facts:
    try:
        return msgspec.json.decode(data, type=Facts)
    except msgspec.DecodeError as error:
        raise ValueError(f"{FACTS_FILE} is not as it should be: {error}") from None


def _saved(info: SnapshotInfo, facts: Facts) -> SavedSnapshot:
    return SavedSnapshot(info.id, info.time_ns, facts, info.tags, info.held, info.size_bytes, info.new_bytes)


class Files:
    """The regular files of a snapshot by path, read on demand."""

    def __init__(self, repository: Repository, top: Entry) -> None:
        self._repository = repository
        self._entries: dict[str, Entry] = {}
        for entry in repository.trees.entries(top.content):
            name = os.fsdecode(entry.name)
            if not entry.is_dir:
                self._entries[name] = entry
                continue
            for inner in repository.trees.entries(entry.content):
                self._entries[f"{name}/{os.fsdecode(inner.name)}"] = inner

    def names(self) -> Iterator[str]:
        return iter(self._entries)

    def entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise NotFound(f"there is no {name} in it, so it is no training state") from None

    def read(self, name: str) -> bytearray:
        entry = self.entry(name)
        room = bytearray(entry.size_bytes)
        read_file(self._repository, entry, memoryview(room))
        return room


def read_file(repository: Repository, entry: Entry, into: memoryview, first_block: int = 0) -> None:
    """The content of a regular file from a block on, checked, into memory that may hold anything; it ends with a block or with the
    file. Damaged."""
    block_size = repository.block_size
    blocks = blocks_of(entry.size_bytes, block_size)
    stop = first_block + blocks_of(len(into), block_size)
    run: list[tuple[int, ChunkId]] = []
    hole_from = 0
    for index, chunk in repository.block_maps.ids(entry.content, entry.map_height, blocks, first_block, stop):
        at = index - first_block
        _fill_zeros(into, hole_from * block_size, at * block_size)
        hole_from = at + 1
        run.append((at, chunk))
        if len(run) == _AT_ONCE:
            _read_run(repository, run, into)
            run = []
    _read_run(repository, run, into)
    _fill_zeros(into, hole_from * block_size, len(into))


def _fill_zeros(into: memoryview, start: int, stop: int) -> None:
    if start < stop:
        into[start:stop] = bytes(stop - start)


def _read_run(repository: Repository, run: list[tuple[int, ChunkId]], into: memoryview) -> None:
    block_size = repository.block_size
    chunks = [chunk for _, chunk in run]
    for piece in repository.bulk.read(chunks):
        index, chunk = run[piece.position]
        if piece.source is None:
            data = memoryview(repository.chunks.get(chunk))
        else:
            data = memoryview(piece.source)[piece.start : piece.end]
        start = index * block_size
        room = min(block_size, len(into) - start)
        if len(data) > room:
            raise Damaged(f"chunk {chunk.hex()} is longer than the block it stands for")
        into[start : start + len(data)] = data
        into[start + len(data) : start + room] = bytes(room - len(data))


def arrays_of(path: str, files: Files, names: Sequence[str]) -> Arrays:
    """The tensors in these files, read. Damaged."""
    arrays = Arrays(path, files)
    arrays.fetch(sorted(names))
    return arrays


class Arrays:
    """The tensors of a snapshot. Files are read in several threads, each with a repository of its own."""

    def __init__(self, path: str, files: Files) -> None:
        self._path = path
        self._files = files
        self._found: dict[str, dict[str, tuple[Any, TensorInFile]]] = {}
        self._made: dict[tuple[str, str], Any] = {}

    def fetch(self, names: Sequence[str]) -> None:
        entries = [(name, self._files.entry(name)) for name in names]
        shares = [entries[number::_THREADS] for number in range(min(_THREADS, len(entries)))]
        with ThreadPoolExecutor(max(1, len(shares)), "ciuic-load") as pool:
            for found in pool.map(self._read_share, shares):
                for name, owner, held in found:
                    object_name = name.partition("/")[0]
                    tensors_of = self._found.setdefault(object_name, {})
                    tensors_of.update({tensor: (owner, facts) for tensor, facts in held.items()})

    def _read_share(self, share: list[tuple[str, Entry]]) -> list[tuple[str, Any, dict[str, TensorInFile]]]:
        done = []
        with Repository.open(self._path) as repository:
            for name, entry in share:
                owner, view = tensors.empty_buffer(entry.size_bytes)
                read_file(repository, entry, view)
                header = decode_header(view.tobytes() if len(view) < 8192 else bytes(view[:8192]), len(view))
                if isinstance(header, int):
                    header = decode_header(bytes(view[:header]), len(view))
                if isinstance(header, int):
                    raise ValueError(f"the header of {name} has no end")
                done.append((name, owner, header))
        return done

    def lookup(self, object_name: str) -> Any:
        """For `structure.unpack`: of one object."""

        def tensor(name: str, packed: dict[str, Any]) -> Any:
            key = object_name, name
            if key not in self._made:
                self._made[key] = self._make(object_name, name, packed)
            return self._made[key]

        return tensor

    def _make(self, object_name: str, name: str, packed: dict[str, Any]) -> Any:
        try:
            owner, facts = self._found[object_name][name]
        except KeyError:
            raise ValueError(f"the tensor {object_name}.{name} is in no file") from None
        array = tensors.Array(
            "numpy" if packed.get("of") == "numpy" else "torch",
            facts.dtype,
            facts.shape,
            facts.stop - facts.start,
            packed.get("dtype", ""),
            tuple(packed.get("shape", ())),
        )
        return tensors.from_buffer(owner, facts.start, array)
