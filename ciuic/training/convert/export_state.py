"""State of a snapshot for exports: whole tensors and plain values by object, saved by any integration and number of ranks.

Guarantees: every byte was read with its checksum; nothing stored is executed, and classes of the program need
not be there.

`torch.load(weights_only=True)` opens what `as_plain` returns, in any program:

=============================  ================================================================================
in the state                   in the file
=============================  ================================================================================
array of NumPy                 tensor; of text or of dates: nested lists
scalar of NumPy                number, str or bytes
Path, UUID, Decimal, Fraction  str
datetime, date, time           str (ISO 8601)
timezone, ZoneInfo             str
timedelta                      float, in seconds
range, slice                   tuple of start, stop and step
deque                          list
frozenset                      tuple
defaultdict                    dict
bytearray                      bytes; empty ones, and empty bytes: an empty str
torch.Generator                dict with ``device`` and ``state``
class of the program           what its ``to_plain`` returned: of an Enum the name (of flags the value), of a
                               named tuple the tuple, of a dataclass a dict of its fields
=============================  ================================================================================
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import pathlib
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ciuic.errors import CiuicError, NotFound, UsageError, pip_install
from ciuic.repository import Repository
from ciuic.training.format import structure
from ciuic.training.format.reading import STATE_FILE, Facts, load_from, read_facts
from ciuic.training.format.stored_files import ReadFrom, SnapshotRef, open_repository
from ciuic.training.format.structure import KIND
from ciuic.training.loading_sets import whole_state
from ciuic.training.logs import log
from ciuic.types import SnapshotId

# The pickle of torch.load has no opcode for integers of more than 255 bytes.
_MAX_INT_BITS: Final = 2000
_TEXTS: Final = (uuid.UUID, decimal.Decimal, fractions.Fraction, datetime.timezone, zoneinfo.ZoneInfo)


def without_classes(packed: Any) -> Any:
    """Replace values of the program's own classes, in what `structure.pack` has written, by their content.

    So a state can be read by a program that has none of these classes.
    """
    if isinstance(packed, list):
        return [without_classes(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    found = {key: without_classes(item) for key, item in packed.items()}
    kind = found.get(KIND)
    if kind == "value" and not structure.is_standard(str(found["type"])):
        content = found["value"]
        # A named tuple's content is a list, and must stay hashable.
        return {KIND: "tuple", "items": content} if isinstance(content, list) else content
    if kind in ("set", "frozenset"):
        found["items"] = [_hashable(item) for item in found["items"]]
    if kind == "dict":
        found["items"] = [[_hashable(key), item] for key, item in found["items"]]
    return found


def _hashable(packed: Any) -> Any:
    """Return what can be a key: of a dataclass the JSON text of its fields."""
    return json.dumps(packed) if isinstance(packed, dict) and KIND not in packed else packed


def as_plain(value: Any) -> Any:
    """Return a state as tensors of torch and plain values (see the table above). Copies no large tensor.

    Equal objects stay one object: tied weights are tied in the result.

    Raises:
        TypeError: A value is of a class that is not known.
    """
    return _Converter().plain(value)


class _Converter:
    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        """Tensors made of arrays, by the identity of the array: tied ones become one tensor."""
        self._kept: list[Any] = []

    def plain(self, value: Any) -> Any:
        # Before all others: a registered class may be derived from any of them.
        convert = _conversion(value)
        if convert is not None:
            return self.plain(convert(value))
        if value is None or isinstance(value, (bool, str, bytes)) or type(value) in (float, complex):
            return _plain_text(value)
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _MAX_INT_BITS else hex(value)
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, bytearray):
            return _plain_text(bytes(value))
        return self._other(value)

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        kind: Any = type(value) if type(value) in (collections.OrderedDict, collections.Counter) else dict
        made: dict[Any, Any] = kind()
        for key, item in value.items():
            made[self._key(key)] = self.plain(item)
        # torch converts the state of a module by the versions in this attribute.
        if kind is collections.OrderedDict and hasattr(value, "_metadata"):
            made._metadata = self.plain(value._metadata)  # type: ignore[attr-defined]
        return made

    def _key(self, value: Any) -> Any:
        """Return what can be a key: of a dataclass the JSON text of its fields."""
        found = self.plain(value)
        return json.dumps(found) if isinstance(found, dict) else found

    def _other(self, value: Any) -> Any:
        import torch  # type: ignore[import-not-found, unused-ignore]

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (torch.Size, torch.dtype, torch.device)):
            return value
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return self._array(value)
        if numpy is not None and isinstance(value, numpy.generic):
            return self.plain(value.item())
        if isinstance(value, (tuple, frozenset)):
            of = self.plain if isinstance(value, tuple) else self._key
            return tuple(of(item) for item in value)
        if isinstance(value, (list, collections.deque)):
            return [self.plain(item) for item in value]
        if isinstance(value, set):
            return {self._key(item) for item in value}
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be a plain value")

    def _tensor(self, value: Any) -> Any:
        if value.layout is not sys.modules["torch"].strided:
            return value
        size_bytes = value.numel() * value.element_size()
        # torch.save writes the whole storage: that of one tensor of many would bring the others along.
        if value.untyped_storage().nbytes() <= size_bytes + (64 << 10):
            return value
        return self._once(value, lambda: value.clone())

    def _array(self, value: Any) -> Any:
        import torch

        # torch has neither text nor dates, and no numbers of the other byte order.
        if value.dtype.kind not in "biufc":
            return self.plain(value.tolist())
        native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
        try:
            return self._once(value, lambda: torch.from_numpy(native.copy()))
        except TypeError:  # such as float128
            return self.plain(value.tolist())

    def _once(self, value: Any, make: Callable[[], Any]) -> Any:
        if id(value) not in self._arrays:
            self._arrays[id(value)] = make()
            # An identity is unique only as long as the object lives.
            self._kept.append(value)
        return self._arrays[id(value)]


def _plain_text(value: Any) -> Any:
    """Return texts and bytes of exactly these types: NumPy's are derived from them."""
    if isinstance(value, str):
        return str(value)
    # The pickle of torch.load has no empty bytes: protocol 2 writes them as a call of the type.
    return (bytes(value) or "") if isinstance(value, bytes) else value


def _conversion(value: Any) -> Callable[[Any], Any] | None:
    if isinstance(value, (pathlib.PurePath, *_TEXTS)):
        return str
    if isinstance(value, (datetime.date, datetime.time)):
        return lambda one: one.isoformat()
    if isinstance(value, datetime.timedelta):
        return datetime.timedelta.total_seconds
    if isinstance(value, (range, slice)):
        return lambda one: (one.start, one.stop, one.step)
    if isinstance(value, collections.deque):
        return list
    found = structure.type_of(value)
    if found is None:
        return None
    # A named tuple's content is a list, as in `without_classes`.
    return lambda one: _tupled(found.to_plain(one))


def _tupled(content: Any) -> Any:
    return tuple(content) if isinstance(content, list) else content


# `dcp.metadata.METADATA_FILE`, in a module that imports torch.
_DCP_FILE: Final = "dcp.json"
LOOPS: Final = "loops"
"""Key of the loops in a checkpoint of Lightning."""
RANDOM: Final = "random_state"
"""Name of the states of the random generators among the values."""
_LIGHTNING: Final = ("checkpoint", "of_rank")
"""Objects of a snapshot that the integration of Lightning has saved."""


@dataclass
class ExportState:
    """State of one snapshot."""

    id: str
    """Id of the snapshot."""
    facts: Facts
    objects: dict[str, Any]
    """States by name, without ``_state_dict``."""
    values: dict[str, Any] = field(default_factory=dict)
    """Plain values of the program, and the manager's random generators."""

    def only(self, names: Sequence[str]) -> ExportState:
        """Return the state with these objects alone; all of them if none is named.

        Raises:
            NotFound: There is no such object; the message names those that are there.
        """
        if not names:
            return self
        every = {**self.objects, **self.values}
        if unknown := [name for name in names if name not in every]:
            raise NotFound(f"{self.id} has no object {', '.join(unknown)}, only {', '.join(every)}")
        return ExportState(self.id, self.facts, {name: every[name] for name in names})

    def whole(self) -> Any:
        """Return everything as one value.

        That is the checkpoint where Lightning's integration has saved it, what `dcp.save` was given, the state
        of the object if there is one alone, and otherwise what `load_snapshot` returns.
        """
        if set(_LIGHTNING) <= set(self.objects):
            return {**lightning_checkpoint(*(self.objects[name] for name in _LIGHTNING)), **self.values}
        if self.is_bare:
            return next(iter(self.objects.values()))
        if self.is_dcp:
            return {**self.objects, **self.values}
        found = {f"{name}_state_dict": state for name, state in self.objects.items()}
        facts = {"epoch": self.facts.epoch, "step": self.facts.step, "metrics": dict(self.facts.metrics)}
        return {**found, **facts, **self.values}

    @property
    def is_bare(self) -> bool:
        """True if this is the state of one object alone, which needs no name."""
        return len(self.objects) == 1 and not self.values

    @property
    def is_dcp(self) -> bool:
        """True if `torch.distributed.checkpoint` has saved it."""
        return self.facts.reason == "torch.distributed.checkpoint"


def lightning_checkpoint(checkpoint: dict[str, Any], of_rank: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint of Lightning's Trainer, of the two objects as which its integration saves it."""
    return {**checkpoint, LOOPS: of_rank[LOOPS]}


def read_snapshot(
    save_dir: ReadFrom, root: bytes | None, snapshot: str | None, also: Sequence[ReadFrom] = ()
) -> ExportState:
    """Read a snapshot's state.

    Args:
        save_dir: Repository.
        root: Path of the training in its snapshots; None for any training.
        snapshot: An id, an unambiguous prefix of one, ``latest``, ``latest~2``, a time; None: the newest that
            can be read whole.
        also: Further repositories, which may have other parts of the state.

    Raises:
        NotFound: There is no such snapshot, it holds no training state, or a part of it is missing.
        Damaged: It is not as it was saved.
        ValueError: This version of ciuic or of the framework does not know what was saved.
    """
    with open_repository(save_dir) as repository:
        if snapshot is not None:
            return _read(save_dir, repository, repository.snapshots.resolve(snapshot), also)
        found = repository.snapshots.list(root=root)
        for number, info in enumerate(found):
            try:
                return _read(save_dir, repository, info.id, also)
            except (CiuicError, ValueError) as error:
                if number == len(found) - 1:
                    raise
                log.warning("ciuic: snapshot %s is passed over: %s", info.id, error)
    where = save_dir if isinstance(save_dir, str) else "it"
    raise NotFound(f"there is no snapshot in {where}")


def _read(
    save_dir: ReadFrom, repository: Repository, id_: SnapshotId, also: Sequence[ReadFrom]
) -> ExportState:
    try:
        names = set(SnapshotRef(save_dir, id_).files(repository).names())
        if STATE_FILE not in names and _DCP_FILE in names:
            return ExportState(id_, read_facts(repository, id_), _read_dcp(save_dir, id_))
        loaded = load_from(whole_state([save_dir, *also], id_), id_, prepare=without_classes)
    except ModuleNotFoundError as error:
        raise missing_package(str(error.name), f"the state in {id_}") from None
    plain = loaded.values.get("plain", ())
    objects: dict[str, Any] = {}
    values: dict[str, Any] = {RANDOM: loaded.values["random"]}
    for name, value in loaded.objects.items():
        # A model given as its state_dict is stored under the key of one.
        if name not in plain or name.endswith("_state_dict"):
            objects[name.removesuffix("_state_dict")] = value
        else:
            values[name] = value
    return ExportState(id_, loaded.facts, objects, values)


def _read_dcp(save_dir: ReadFrom, id_: str) -> dict[str, Any]:
    from torch.distributed.checkpoint import default_planner

    from ciuic.training.dcp.reading import CiuicStorageReader

    planner: Any = vars(default_planner)["_EmptyStateDictLoadPlanner"]
    return load_everything(CiuicStorageReader.of(SnapshotRef(save_dir, id_)), planner())


def load_everything(reader: Any, planner: Any) -> dict[str, Any]:
    """Load a checkpoint of `torch.distributed.checkpoint` without a state to fill, in this process alone.

    Args:
        reader: Storage reader.
        planner: Planner that makes the state of the metadata.

    Raises:
        CiuicError: What the reader raised; so with ValueError and OSError.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException

    found: dict[str, Any] = {}
    try:
        # As torch's own dcp_to_torch_save does it: there is no public way.
        state_dict_loader._load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    # A BaseException, with what each rank raised and its traceback in the text.
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    return {name: _with_optimizer_numbers(value) for name, value in found.items()}


def _with_optimizer_numbers(found: Any) -> Any:
    """Return a state that torch's planner has unflattened, with optimizers' states by number again.

    The planner makes texts or places in a list of integers that are keys, and nothing of an empty dict.
    """
    if not isinstance(found, dict):
        return found
    made = {key: _with_optimizer_numbers(value) for key, value in found.items()}
    groups = made.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(one, dict) and "params" in one for one in groups):
        return made
    states = made.setdefault("state", {})
    if isinstance(states, list):
        made["state"] = {number: one for number, one in enumerate(states) if one is not None}
    elif isinstance(states, dict) and all(type(one) is int for group in groups for one in group["params"]):
        made["state"] = {int(key) if str(key).isdecimal() else key: one for key, one in states.items()}
    return made


def missing_package(name: str, what: str) -> UsageError:
    """Return the error for a package that is not installed."""
    return UsageError(f"{what} needs the package {name}, which is not installed", hint=pip_install(name))
