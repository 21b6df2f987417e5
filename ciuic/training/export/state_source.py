"""State of a snapshot for exports: whole tensors by object, saved by any integration and number of ranks.

Guarantees: every byte was read with its checksum; nothing stored is executed, and classes of the program need
not be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ciuic.errors import CiuicError, NotFound, UsageError
from ciuic.repository import Repository
from ciuic.training.export.plain_values import without_classes
from ciuic.training.format.reading import STATE_FILE, Facts, load, read_facts
from ciuic.training.format.stored_files import ReadFrom, SnapshotRef, open_repository
from ciuic.training.logs import log
from ciuic.types import SnapshotId

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


def read_snapshot(save_dir: ReadFrom, root: bytes | None, snapshot: str | None) -> ExportState:
    """Read a snapshot's state.

    Args:
        save_dir: Repository.
        root: Path of the training in its snapshots; None for any training.
        snapshot: An id, an unambiguous prefix of one, ``latest``, ``latest~2``, a time; None: the newest that
            can be read whole.

    Raises:
        NotFound: There is no such snapshot, or it holds no training state.
        Damaged: It is not as it was saved.
        ValueError: This version of ciuic or of the framework does not know what was saved.
    """
    with open_repository(save_dir) as repository:
        if snapshot is not None:
            return _read(save_dir, repository, repository.snapshots.resolve(snapshot))
        found = repository.snapshots.list(root=root)
        for number, info in enumerate(found):
            try:
                return _read(save_dir, repository, info.id)
            except (CiuicError, ValueError) as error:
                if number == len(found) - 1:
                    raise
                log.warning("ciuic: snapshot %s is passed over: %s", info.id, error)
    where = save_dir if isinstance(save_dir, str) else "it"
    raise NotFound(f"there is no snapshot in {where}")


def _read(save_dir: ReadFrom, repository: Repository, id_: SnapshotId) -> ExportState:
    try:
        names = set(SnapshotRef(save_dir, id_).files(repository).names())
        if STATE_FILE not in names and _DCP_FILE in names:
            return ExportState(id_, read_facts(repository, id_), _read_dcp(save_dir, id_))
        loaded = load(save_dir, id_, prepare=without_classes)
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
    return {name: with_optimizer_numbers(value) for name, value in found.items()}


def with_optimizer_numbers(found: Any) -> Any:
    """Return a state that torch's planner has unflattened, with optimizers' states by number again.

    The planner makes texts or places in a list of integers that are keys, and nothing of an empty dict.
    """
    if not isinstance(found, dict):
        return found
    made = {key: with_optimizer_numbers(value) for key, value in found.items()}
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
    return UsageError(f"{what} needs the package {name}, which is not installed", hint=f"pip install {name}")
