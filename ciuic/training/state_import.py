"""Import of a state in a format of others: what its parts are called in a snapshot, and the snapshot itself.

The state is read and stored in a process of its own (`ciuic.training.import_process`), whose memory and processor time are limited by
the size of what is read: a file of a few kilobytes may take a parser gigabytes or hours.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.errors import CiuicError, NotFound, UsageError, error_of
from ciuic.structs import decode_json, decode_msgpack
from ciuic.system.child_process import environment, module_command
from ciuic.system.privileges import limit_resources
from ciuic.training.arguments import ManagerOptions, is_value_name
from ciuic.training.convert.export_state import LOOPS, RANDOM, missing_package
from ciuic.training.json_documents import MALFORMED
from ciuic.training.manager import SnapshotManager
from ciuic.training.results import EXIT_SECONDS
from ciuic.training.state import stateful
from ciuic.units import human_size

TAG: Final = "imported"
"""Tag of every snapshot that was imported."""
_SUFFIX: Final = "_state_dict"
_STEPS: Final = ("step", "global_step", "iteration")
_FACTS: Final = ("epoch", "metrics", RANDOM, *_STEPS)
_LIGHTNING: Final = "pytorch-lightning_version"
_MODULE: Final = "ciuic.training.import_process"
_DCP_METADATA: Final = ".metadata"
_START_BYTES: Final = 2 << 30
"""Memory of the process for its libraries, threads and buffers."""
_MEMORY_FACTOR: Final = 4
"""Memory of the process in sizes of what is read."""
_START_SECONDS: Final = 30
"""Processor time for what does not depend on size: importing torch takes four seconds."""
_BYTES_PER_SECOND: Final = 4 << 20
"""Least speed of reading and storing, codecs included."""


class Imported(NamedTuple):
    """Snapshot that an import has made, and what could not become part of it."""

    id: str
    """Id of the snapshot, which is durable."""
    objects: tuple[str, ...]
    """Names of the objects; `SnapshotManager.resume` restores those that are registered under them."""
    values: tuple[str, ...]
    """Names of the plain values."""
    left_out: tuple[str, ...]
    """Names of what could not become part of the snapshot."""


@dataclass
class ForeignState:
    """A state as the parts of a snapshot."""

    objects: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    random: dict[str, Any] | None = None
    left_out: list[str] = field(default_factory=list)


def import_state(
    path: str | os.PathLike[str],
    save_dir: str | os.PathLike[str],
    *,
    name: str = "training",
    tags: Sequence[str] = (),
) -> Imported:
    """Make a snapshot of a state that another program has written; it is durable on return.

    Nothing that is read is executed. ``manager.resume()`` in that directory then restores the objects whose
    names fit.

    Args:
        path: A file of `torch.save` (also a checkpoint of Lightning) or safetensors, a directory of
            `torch.distributed.checkpoint`, a folder of `save_pretrained`, or a checkpoint of the Trainer.
        save_dir: Directory of the repository, created if it is missing.
        name: Name of the run.
        tags: Further tags of the snapshot.

    Raises:
        NotFound: There is nothing at ``path``.
        UsageError: It is of no known format, has what only pickle could load, or needs a package that is not
            installed.
        ValueError: It is malformed.
        TypeError: A value cannot be stored; the message names it.
    """
    source = Path(path).absolute()
    if not source.exists():
        raise NotFound(f"{source} is not there")
    if importlib.util.find_spec("torch") is None:
        raise missing_package("torch", f"importing {path}")
    order = ImportOrder(str(source), os.path.abspath(os.fspath(save_dir)), name, tuple(tags))
    done = subprocess.run(
        module_command(_MODULE),
        input=order.encode(),
        stdout=subprocess.PIPE,
        env=environment(of_trainer=True),
        cwd="/",
        check=False,
    )
    if done.returncode == -signal.SIGXCPU:
        raise UsageError(f"{source} takes far more processor time to read than files of its size do")
    if done.returncode:
        raise UsageError(f"{source} could not be read: its reader ended with status {done.returncode}")
    answer = decode_json(done.stdout, ImportAnswer)
    if answer.done is not None:
        return answer.done
    if answer.exit_code:
        raise error_of(answer.exit_code, answer.message, hint=answer.hint)
    raise (TypeError if answer.is_type else ValueError)(answer.message)


class ImportOrder(NamedTuple):
    """Request to the import process: the arguments of `import_state`."""

    path: str
    save_dir: str
    name: str
    tags: tuple[str, ...]

    def encode(self) -> bytes:
        """Return the order as the process reads it; any file name is kept."""
        return msgspec.msgpack.encode(
            [os.fsencode(self.path), os.fsencode(self.save_dir), self.name, self.tags]
        )

    @classmethod
    def decode(cls, data: bytes) -> ImportOrder:
        """Return the order that `encode` wrote."""
        path, save_dir, name, tags = decode_msgpack(data, tuple[bytes, bytes, str, tuple[str, ...]])
        return cls(os.fsdecode(path), os.fsdecode(save_dir), name, tags)


class ImportAnswer(msgspec.Struct, omit_defaults=True):
    """Reply of the import process: the result, or the exception that `import_state` raises."""

    done: Imported | None = None
    exit_code: int = 0
    """Exit code of a CiuicError; 0 for a ValueError or TypeError."""
    is_type: bool = False
    message: str = ""
    hint: str = ""


def answer_order(order: ImportOrder) -> ImportAnswer:
    """Import in this very process, within limits that stay in force."""
    path = Path(order.path)
    try:
        return ImportAnswer(_import(path, order))
    except CiuicError as error:
        return ImportAnswer(exit_code=error.exit_code, message=error.message, hint=error.hint)
    except MemoryError:
        return ImportAnswer(message=f"{path} takes far more memory to read than files of its size do")
    except TypeError as error:
        return ImportAnswer(is_type=True, message=str(error))
    except ValueError as error:
        return ImportAnswer(message=str(error))
    except OSError as error:
        return ImportAnswer(exit_code=UsageError.exit_code, message=f"{path} cannot be read: {error}")
    # Whatever else a parser raises for bytes that no program has written.
    except Exception as error:
        return ImportAnswer(message=f"{path} is malformed: {type(error).__name__}: {error}")


def _limit(path: Path) -> int:
    """Limit this process by the size of what it is to read; return that size."""
    # Imports torch, which is a package that may be missing.
    from ciuic.training.convert.foreign_files import ForeignDirectory

    if path.is_dir():
        with ForeignDirectory(path) as directory:
            size_bytes = directory.size_bytes()
    else:
        size_bytes = path.stat().st_size
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A file of holes may have any size: no more than there is, because the state is to be in memory as a whole.
    if size_bytes > memory_bytes:
        raise UsageError(
            f"{path} has {human_size(size_bytes)}, and is read into memory, of which there are {human_size(memory_bytes)}"
        )
    limit_resources(
        _START_BYTES + _MEMORY_FACTOR * size_bytes, _START_SECONDS + size_bytes // _BYTES_PER_SECOND
    )
    return size_bytes


def _import(path: Path, order: ImportOrder) -> Imported:
    try:
        found = _read(path, _limit(path))
    except ModuleNotFoundError as error:
        raise missing_package(str(error.name), f"importing {path}") from None
    if not found.objects:
        raise UsageError(f"{path} has no state of an object: no tensors by name")
    # A snapshot has the generators of its process: those of the state, if they came with it.
    if found.random is not None and not _restore_generators(found.random):
        found.left_out.append(RANDOM)
    return _save(found, order.save_dir, order.name, order.tags)


def _save(found: ForeignState, save_dir: str, name: str, tags: Sequence[str]) -> Imported:
    with SnapshotManager(save_dir, name=name, options=ManagerOptions(distributed=False)) as manager:
        manager.framework.set_objects({key: _Given(state) for key, state in found.objects.items()})
        save = manager.save_snapshot(
            epoch=found.epoch,
            step=found.step,
            metrics=found.metrics,
            tags=(TAG, *tags),
            wait=True,
            **found.values,
        )
        error = manager.stats.last_error if save is None else save.error
        id_ = None if save is None else save.id
    if id_ is None:
        raise CiuicError(f"the state was not stored: {error or f'not within {EXIT_SECONDS:.0f} seconds'}")
    return Imported(id_, tuple(found.objects), tuple(found.values), tuple(found.left_out))


class _Given:
    """Object with a state that was read."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError("an imported state is only saved")


def _read(path: Path, size_bytes: int) -> ForeignState:
    from ciuic.training.convert import foreign_files
    from ciuic.training.convert.foreign_files import ForeignDirectory, open_foreign

    if not path.is_dir():
        with open_foreign(path) as file:
            if path.suffix == ".safetensors":
                return ForeignState({"model": foreign_files.read_safetensors(file, str(path))})
            found = foreign_files.load_plain(file, str(path))
    else:
        with ForeignDirectory(path) as directory:
            if not directory.has(_DCP_METADATA):
                objects, step, epoch = foreign_files.read_hugging_face(directory)
                directory.require_unchanged()
                foreign_files.check_extent(objects, size_bytes)
                return ForeignState(objects, step=step, epoch=epoch)
            from ciuic.training.convert.dcp_import import read_dcp

            found = read_dcp(directory)
            directory.require_unchanged()
    foreign_files.check_extent(found, size_bytes)
    return _sort_state(found)


def _sort_state(found: Any) -> ForeignState:
    """Sort what a program has saved into objects, values and facts.

    =====================================  =================================================================
    in the state                           in the snapshot
    =====================================  =================================================================
    tensors alone, by name                 the object ``model``
    checkpoint of Lightning                the objects of its integration
    ``NAME_state_dict``                    the object ``NAME``; ``state_dict``: the object ``model``
    a dict under any other name            the object of that name, unless others are marked by ``_state_dict``
    ``epoch``; ``step``, ``global_step``,  facts
    ``iteration``; ``metrics``
    ``random_state`` of `export`           the random generators
    any other value                        a plain value under its name
    =====================================  =================================================================

    Raises:
        UsageError: It is no dict.
    """
    if not isinstance(found, Mapping):
        raise UsageError(f"the state must be a dict, got a {type(found).__name__}")
    state = ForeignState(step=_step(found), epoch=_count(found.get("epoch")), metrics=_metrics(found))
    if found and all(_is_tensor(value) for value in found.values()):
        state.objects["model"] = dict(found)
        return state
    if _LIGHTNING in found and LOOPS in found:
        checkpoint = {key: value for key, value in found.items() if key != LOOPS}
        of_rank = {LOOPS: found[LOOPS], "buffers": {}, "results": {}}
        state.objects = {"checkpoint": checkpoint, "of_rank": of_rank}
        return state
    random = found.get(RANDOM)
    state.random = dict(random) if isinstance(random, Mapping) else None
    # Where states are marked as such, other dicts are values.
    are_marked = any(str(key).endswith(_SUFFIX) for key in found)
    for key, value in found.items():
        if key not in _FACTS:
            _add(state, str(key), value, are_marked=are_marked)
    return state


def _add(state: ForeignState, key: str, value: Any, *, are_marked: bool) -> None:
    name = "model" if key == "state_dict" else key.removesuffix(_SUFFIX)
    is_object = key.endswith("state_dict") or (isinstance(value, Mapping) and not are_marked)
    if not is_value_name(name) or name in state.objects or name in state.values:
        state.left_out.append(key)
    elif is_object:
        state.objects[name] = value
    else:
        state.values[name] = value


def _step(found: Mapping[Any, Any]) -> int | None:
    return next((count for key in _STEPS if (count := _count(found.get(key))) is not None), None)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _metrics(found: Mapping[Any, Any]) -> dict[str, float]:
    metrics = found.get("metrics")
    if not isinstance(metrics, Mapping):
        return {}
    return {str(key): float(value) for key, value in metrics.items() if isinstance(value, (int, float))}


def _is_tensor(value: Any) -> bool:
    import torch  # type: ignore[import-not-found, unused-ignore]

    return isinstance(value, torch.Tensor)


def _restore_generators(random: dict[str, Any]) -> bool:
    """Set the generators of this process; return whether they could be set."""
    numpy = random.get("numpy")
    try:
        if numpy is not None:
            # The export has made a tensor of the array in it.
            inner = {**numpy["state"], "key": numpy["state"]["key"].numpy()}
            random = {**random, "numpy": {**numpy, "state": inner}}
        return not stateful.restore_random_states(random)
    except (*MALFORMED, ValueError):
        return False
