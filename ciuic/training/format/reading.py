"""Training states and their facts (metrics, versions) in a repository: loading, checking, the search for the newest good one.

Guarantees: every byte that becomes part of a state was read with its checksum; nothing that is stored is
executed; a damaged or incomplete snapshot is passed over with the reason, never returned in part. Needs no
writer, no daemon and no lock.

`check_resolves` looks where a reader looks, at the headers of all files, and makes no tensor: it needs neither torch
nor NumPy. That the content is the one that was stored is for the ids of the chunks to tell.
"""

from __future__ import annotations

import math
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

import msgspec

from ciuic import __version__
from ciuic.errors import CiuicError, Damaged
from ciuic.repository import DamagedChunk, Repository, SnapshotInfo, Walker
from ciuic.repository.snapshots import CommittedSnapshots
from ciuic.structs import json_decoder
from ciuic.training.format import structure, tensors
from ciuic.training.format.layout import SUFFIX, TensorInFile
from ciuic.training.format.shards import TemplateLookup, is_whole, parse_piece
from ciuic.training.format.stored_files import (
    Files,
    RangeReader,
    ReadFrom,
    SnapshotRef,
    StateRef,
    arrays_of,
    cut_to_templates,
    top_of,
)
from ciuic.training.format.tensors import SAFETENSORS_NAMES, stored_shape
from ciuic.training.json_documents import MALFORMED, decode_json, raise_shortage
from ciuic.training.logs import log
from ciuic.types import ChunkId, Pair, SnapshotId

STATE_FILE: Final = "state.json"
FACTS_FILE: Final = "snapshot.json"
STATE_VERSION: Final = 1
_NONFINITE: Final = ("nan", "inf", "-inf")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a snapshot that can be read without its state: the file `snapshot.json`.

    Unknown fields are ignored.
    """

    version: int = STATE_VERSION
    step: int | None = None
    """Optimizer steps since the run began, restarts included."""
    epoch: int | None = None
    metrics: dict[str, float] = {}
    nonfinite: dict[str, str] = {}
    """Metrics that are not finite, as ``nan``, ``inf`` or ``-inf``, in the stored file alone.

    JSON has no number for them. In memory they are in ``metrics`` with the others.
    """
    reason: str = ""
    """Why the snapshot was taken."""
    objects: tuple[str, ...] = ()
    """Names of the saved objects."""
    size_bytes: int = 0
    """Size of all tensors."""
    run: str = ""
    """Id of the run, 32 hexadecimal digits; the same in all its snapshots, also after a resume."""
    trackers: dict[str, dict[str, str]] = {}
    """Runs of experiment trackers to which the save is logged: by tracker, ``run`` with the id and what else names it."""
    rank: int = 0
    world_size: int = 1
    framework: dict[str, str] = {}
    """Versions of python, torch, numpy, …, and the name of the host."""


class SavedSnapshot(NamedTuple):
    """Entry of `SnapshotManager.list_snapshots`."""

    id: str
    time_ns: int
    facts: Facts
    tags: tuple[str, ...]
    held: bool
    size_bytes: int
    new_bytes: int
    """Growth of the repository."""
    filesystem: Pair | None = None
    """Snapshot of the files that was asked for together with this one, or why there is none."""


class PassedOver(NamedTuple):
    """A snapshot newer than the loaded one, and the reason why it was not loaded."""

    id: str
    reason: str


@dataclass
class Loaded:
    """Content of a snapshot, and the newer ones that were passed over."""

    id: str
    facts: Facts
    objects: dict[str, Any]
    """States by registered name, as `state_dict` returned them, with tensors on the CPU."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values of the manager itself: random generators, positions."""
    passed_over: list[PassedOver] = field(default_factory=list)
    time_ns: int = 0
    """Place of the snapshot in the order of snapshots, by the clock of its host."""


def saved_snapshots(repository: Repository, root: bytes | None) -> list[SavedSnapshot]:
    """Return the snapshots of a training, newest first.

    Snapshots that cannot be read are left out; `newest_good` names them.
    """
    found = []
    for info in repository.snapshots.list(root=root):
        # One damaged snapshot must not hide the others.
        try:
            pair = repository.snapshots.load(info.id).pair
            found.append(_entry_of(info, read_facts(repository, info.id), pair))
        except (CiuicError, ValueError):
            continue
    return found


def check_unreadable(
    snapshots: CommittedSnapshots, is_own: Callable[[str], bool | None] = lambda id_: None
) -> None:
    """Check that a training of which no snapshot can be listed has none that cannot be read.

    What may be of another training, because there are snapshots of others, is logged and does not keep this one from
    beginning.

    Args:
        snapshots: Snapshots of a repository or remote.
        is_own: Tells of an id whether it is one of this training; None: unknown, as its file is what cannot be read.

    Raises:
        NoUsableSnapshot: One of the training cannot be read.
    """
    known = snapshots.infos()
    # The files are read anew only where there are more of them than could be listed.
    unreadable = snapshots.unreadable() if len(snapshots.names()) > len(known) else []
    own: list[PassedOver] = []
    possible: list[PassedOver] = []
    for one in unreadable:
        if (is_of_training := is_own(one.id)) is not False:
            (own if is_of_training or not known else possible).append(PassedOver(one.id, one.reason))
    for id_, reason in possible:
        log.warning("ciuic: snapshot %s cannot be read, and may be one of this training: %s", id_, reason)
    if own:
        raise NoUsableSnapshot(own)


def newest_good(
    path: str,
    candidates: Sequence[SavedSnapshot | SnapshotInfo],
    templates: Mapping[str, TemplateLookup] | None = None,
) -> Loaded | None:
    """Load the first snapshot that can be read whole.

    Args:
        path: Repository.
        candidates: Snapshots, newest first.
        templates: Templates of sharded objects; see `load`.

    Returns:
        The state, with the snapshots that were passed over; None if there are no candidates.

    Raises:
        NoUsableSnapshot: None of them can be read whole.
    """
    passed_over: list[PassedOver] = []
    for candidate in candidates:
        try:
            loaded = load(path, candidate.id, templates)
        # Not OSError: it says nothing about the snapshot, and an older one must not be taken for the newest.
        except (CiuicError, ValueError) as error:
            passed_over.append(PassedOver(candidate.id, str(error)))
            continue
        loaded.passed_over = passed_over
        return loaded
    if passed_over:
        raise NoUsableSnapshot(passed_over)
    return None


class NoUsableSnapshot(Damaged):
    """Error: there are snapshots, and none can be read whole."""

    def __init__(self, passed_over: list[PassedOver]) -> None:
        """List the snapshots with the reasons in the message."""
        reasons = "; ".join(f"{id_}: {reason}" for id_, reason in passed_over)
        super().__init__(f"no snapshot can be read whole: {reasons}", hint="ciuic --repo DIR check")
        self.passed_over = passed_over


def damaged_chunks(repository: Repository, id_: SnapshotId) -> list[ChunkId]:
    """Return the chunks of a snapshot of which no good copy can be read.

    This reads the whole snapshot. The result is empty if the snapshot's own file is damaged.
    """
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


def load(
    path: ReadFrom,
    id_: str,
    templates: Mapping[str, TemplateLookup] | None = None,
    prepare: Callable[[Any], Any] | None = None,
) -> Loaded:
    """Load the state in one snapshot of a repository; as `load_from`."""
    return load_from(SnapshotRef(path, id_), id_, templates, prepare)


def load_from(
    state_ref: StateRef,
    id_: str,
    templates: Mapping[str, TemplateLookup] | None = None,
    prepare: Callable[[Any], Any] | None = None,
) -> Loaded:
    """Load a state.

    Args:
        state_ref: Where it is stored.
        id_: What the state and errors call it.
        templates: Templates of sharded objects by name, of which only this rank's part is loaded
            (`stored_files.cut_to_templates`).
        prepare: Applied to what stands for a state in `state.json` before values are made of it.

    Raises:
        NotFound: There is no such snapshot, or it holds no training state.
        Damaged: Something is not as it was saved.
        ValueError: This version of ciuic or of the framework does not know what was saved.
        OSError: It cannot be read, or does not fit into memory.
    """
    source = RangeReader(state_ref)
    try:
        # Tensors that are created in torch's inference mode could not be trained afterwards.
        with tensors.outside_inference_mode(), state_ref.open() as files:
            facts = _decode_facts(files.read(FACTS_FILE))
            state = decode_json(files.read(STATE_FILE), STATE_FILE)
            # A later version may mean something else by the same fields.
            if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
                raise ValueError(f"{id_} was written by a later version of ciuic than {__version__}")
            arrays = arrays_of(
                state_ref, files, [name for name in files.names() if name.endswith(SUFFIX)], source
            )
            objects = {}
            prepare = prepare or (lambda skeleton: skeleton)
            for name, skeleton in state["objects"].items():
                found = structure.unpack(prepare(skeleton), arrays.lookup(name))
                template = (templates or {}).get(name)
                if template is not None or arrays.has_pieces(name):
                    # Without a template all of a tensor is loaded, from the pieces of all ranks.
                    found = cut_to_templates(found, template or (lambda _: None))
                objects[name] = found
            values = structure.unpack(prepare(state["values"]), arrays.lookup("values"))
            return Loaded(id_, facts, objects, values, time_ns=files.time_ns)
    # Any process that can write the repository may have written these documents: whatever making values of
    # them raises is a ValueError, so that the snapshot is passed over and the one before it is tried.
    except (*MALFORMED, MemoryError) as error:
        raise_shortage(error)
        raise ValueError(f"the state is malformed: {error!r}") from None
    finally:
        source.close()


def read_facts(repository: Repository, id_: SnapshotId) -> Facts:
    """Read `snapshot.json`.

    Raises:
        NotFound: There is no such snapshot, or it holds no training state.
        Damaged: The file cannot be read.
        ValueError: The file is not as it should be.
    """
    return _decode_facts(SnapshotRef("", id_).files(repository).read(FACTS_FILE))


def encode_facts(facts: Facts) -> bytes:
    """Return the content of `snapshot.json`."""
    # In a field of their own: readers that do not know it still read the snapshot, without these metrics.
    finite = {name: value for name, value in facts.metrics.items() if math.isfinite(value)}
    others = {name: repr(float(value)) for name, value in facts.metrics.items() if name not in finite}
    stored = msgspec.structs.replace(facts, metrics=finite, nonfinite=others)
    return msgspec.json.format(msgspec.json.encode(stored), indent=1)


def _decode_facts(data: bytes | bytearray) -> Facts:
    try:
        facts = json_decoder(Facts).decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{FACTS_FILE} is malformed: {error}") from None
    others = {name: float(kind) for name, kind in facts.nonfinite.items() if kind in _NONFINITE}
    return msgspec.structs.replace(facts, metrics=facts.metrics | others, nonfinite={})


def _entry_of(info: SnapshotInfo, facts: Facts, pair: Pair | None) -> SavedSnapshot:
    return SavedSnapshot(
        info.id, info.time_ns, facts, info.tags, info.held, info.size_bytes, info.new_bytes, pair
    )


def metric_floats(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as plain floats."""
    return {key: float(value) for key, value in metrics.items()}


def facts_summary(facts: Facts) -> str:
    """Return epoch, step and metrics as one line."""
    parts = [] if facts.epoch is None else [f"epoch {facts.epoch}"]
    parts += [] if facts.step is None else [f"step {facts.step}"]
    parts += [f"{key} {value:.4g}" for key, value in metric_floats(facts.metrics).items()]
    return ", ".join(parts)


def framework_versions() -> dict[str, str]:
    """Return the versions of Python and of the imported frameworks, and the name of the host."""
    found = {"python": platform.python_version(), "host": socket.gethostname()}
    # Looked up, not imported: ciuic imports no framework for a program that does not use it.
    for name in ("torch", "numpy", "tensorflow", "keras"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", ""))
    return found


def check_resolves(repository: Repository, id_: SnapshotId) -> None:
    """Check that a reader finds every tensor of a state, with its shape and dtype.

    A snapshot without a training state has nothing to find. Of one that is part of a set the shards of other
    members are not looked for.

    Raises:
        Damaged: A tensor is in no file or another than it is described, or a document is not as it should be.
        CiuicError: A file cannot be read.
    """
    snapshot = repository.snapshots.load(id_)
    if not snapshot.roots or snapshot.roots[0].entry is None:
        return
    files = Files(repository, top_of(snapshot.roots[0].entry, id_))
    names = list(files.names())
    if FACTS_FILE not in names or STATE_FILE not in names:
        return
    try:
        read_facts(repository, id_)
        document = files.read(STATE_FILE)
        held: dict[str, dict[str, TensorInFile]] = {}
        for name in names:
            if name.endswith(SUFFIX):
                held.setdefault(name.partition("/")[0], {}).update(files.header(name))
        member = snapshot.set_member
        check_document(document, held, is_part=member is not None and len(member.members) > 1)
    except (*MALFORMED, ValueError) as error:
        raise Damaged(f"the state of {id_} cannot be loaded: {error}") from None


def check_document(
    data: bytes | bytearray, held: Mapping[str, Mapping[str, TensorInFile]], *, is_part: bool = False
) -> None:
    """Check that the tensors of a state's document are held by its files.

    Args:
        data: Content of `state.json`.
        held: Tensors in the files by object and name.
        is_part: True if other snapshots have further pieces.

    Raises:
        ValueError: A tensor is in no file or another than it is described, or the document is no JSON.
        Exception: One of `MALFORMED`: the document is not as it should be.
    """
    state = decode_json(data, STATE_FILE)
    if state["version"] != STATE_VERSION:
        return  # a later version's own affair
    for of, skeleton in {**state["objects"], "values": state["values"]}.items():
        for own in _tensors_of(skeleton):
            _check_tensor(own, held.get(of, {}), f"{of}.{own['name']}", is_part)


def _tensors_of(skeleton: Any) -> Iterator[dict[str, Any]]:
    """Yield what stands for each tensor in a packed state."""
    stack = [skeleton]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if value.get("$") in ("tensor", "sharded"):
                yield value
            else:
                stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)


def _check_tensor(own: dict[str, Any], held: Mapping[str, TensorInFile], called: str, is_part: bool) -> None:
    """Raise ValueError unless a described tensor is held."""
    if own["$"] == "sharded":
        _check_pieces(own, held, called, is_part)
    elif own["name"] not in held:
        raise ValueError(f"the tensor {called} is in no file")
    elif "dtype" in own:
        # Stored as bytes, because safetensors has no name for its dtype.
        where, elements = held[own["name"]], prod(stored_shape(own["shape"]))
        size_bytes = where.stop - where.start
        if where.dtype != "U8" or (size_bytes % elements if elements else size_bytes):
            raise ValueError(f"the tensor {called} of shape {own['shape']} cannot have {size_bytes} bytes")


def _check_pieces(own: dict[str, Any], held: Mapping[str, TensorInFile], called: str, is_part: bool) -> None:
    shape, dtype = stored_shape(own["shape"]), SAFETENSORS_NAMES.get(own["dtype"])
    regions = set()
    for name, where in held.items():
        piece = parse_piece(name)
        if piece is None or piece[0] != own["name"]:
            continue
        if dtype is None:
            return  # stored as bytes, along the last dimension
        if where.dtype != dtype:
            raise ValueError(f"a piece of the tensor {called} is of {where.dtype}, expected {dtype}")
        regions.add((piece[1], where.shape))
    if not is_part and not is_whole(list(regions), shape):
        raise ValueError(f"the pieces of the tensor {called} do not make up the whole")
