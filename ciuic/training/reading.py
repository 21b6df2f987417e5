"""A trainer's state out of the repository, checked, and the search for the newest good one.

Guarantees: every byte that becomes part of a state was read with its checksum; nothing that is stored is executed; a snapshot that is
damaged or incomplete is passed over with its reason, never handed out in part. Needs no writer, no daemon and no lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.errors import CiuicError, Damaged
from ciuic.repository import DamagedChunk, Repository, SnapshotInfo, Walker
from ciuic.training import structure, tensors
from ciuic.training.arrays import arrays_of
from ciuic.training.documents import MALFORMED, decode_json
from ciuic.training.files import Opened
from ciuic.training.layout import SUFFIX
from ciuic.training.pieces import InPieces, Source
from ciuic.training.shards import Like, fitted
from ciuic.types import ChunkId, Pair, SnapshotId

STATE_FILE: Final = "state.json"
FACTS_FILE: Final = "snapshot.json"
STATE_VERSION: Final = 1


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
    filesystem: Pair | None = None
    """What is known of the snapshot of the files that was asked for with it."""


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
            pair = repository.snapshots.load(info.id).pair
            found.append(_saved(info, read_facts(repository, info.id), pair))
        except (CiuicError, ValueError):
            continue
    return found


def newest_good(
    path: str, candidates: Sequence[SavedSnapshot | SnapshotInfo], likes: Mapping[str, Like] | None = None
) -> Loaded | None:
    """The first of them that can be read whole, with what was passed over; None if there are none. NothingGood if none can."""
    passed_over: list[PassedOver] = []
    for candidate in candidates:
        try:
            loaded = load(path, candidate.id, likes)
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


def load(path: str, id_: str, likes: Mapping[str, Like] | None = None) -> Loaded:
    """The state in one snapshot; of an object in ``likes`` the parts that this rank has (`shards.fitted`). NotFound; Damaged where anything of it is not as it was saved; ValueError where this version, or
    this version of the framework, does not know what was saved."""
    opened = Opened(path, id_)
    source = Source(opened)
    try:
        with tensors.normally(), Repository.open(path) as repository:
            files = opened.files(repository)
            facts = _decode_facts(files.read(FACTS_FILE))
            state = decode_json(files.read(STATE_FILE), STATE_FILE)
            if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
                raise ValueError(f"{id_} was written by a later version of ciuic")
            arrays = arrays_of(path, files, [name for name in files.names() if name.endswith(SUFFIX)], source)
            objects = {}
            for name, skeleton in state["objects"].items():
                found = structure.unpack(skeleton, arrays.lookup(name))
                like = (likes or {}).get(name)
                if like is not None or arrays.has_pieces(name):
                    found = fitted(found, like or (lambda _: None), InPieces)
                objects[name] = found
            values = structure.unpack(state["values"], arrays.lookup("values"))
            return Loaded(id_, facts, objects, values)
    except MALFORMED as error:
        raise ValueError(f"the state is not as it should be: {error!r}") from None
    except MemoryError:
        raise ValueError("the state is larger than the memory") from None
    finally:
        source.close()


def read_facts(repository: Repository, id_: SnapshotId) -> Facts:
    return _decode_facts(Opened("", id_).files(repository).read(FACTS_FILE))


def _decode_facts(data: bytes | bytearray) -> Facts:
    try:
        return msgspec.json.decode(data, type=Facts)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{FACTS_FILE} is not as it should be: {error}") from None


def _saved(info: SnapshotInfo, facts: Facts, pair: Pair | None) -> SavedSnapshot:
    return SavedSnapshot(
        info.id, info.time_ns, facts, info.tags, info.held, info.size_bytes, info.new_bytes, pair
    )
