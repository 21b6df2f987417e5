"""Accelerate: register all objects of an Accelerator with a `SnapshotManager`.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(anything)
    manager = SnapshotManager("./snapshots", every_steps=500)
    register(manager, accelerator)
    resumed = manager.resume()

Guarantees: saves and resumes as with objects that were registered one by one, at the boundaries of optimizer
steps (not of the batches that are accumulated for one), at the position in the data, with the shuffled order
of `prepare`'s loaders. Models are saved unwrapped, so that a snapshot of several processes resumes on one;
every process calls `register`, and gets its own generators and position back. Not repeated: what a data set
draws from the global generators, because the loaders read one batch ahead. A loader that torchdata makes
stateful is asked for its own position. Not supported: FSDP and Megatron-LM, which shard the state, and
DeepSpeed, for which there is `ciuic.integrations.deepspeed`.

For a program that calls `save_state` and `load_state` itself, one line, and these calls stay as they are:

    store_states("./snapshots", accelerator, max_snapshots=10)

Accelerate's own methods run, with its rules for names, limits and hooks; only the functions that write and read
the files are replaced while they run. `ciuic.json` in a directory names the snapshot (as `checkpoint_pointer`).
A directory without it is Accelerate's own, and is loaded by Accelerate. Guarantees: `load_state` restores the snapshot
that the directory names, verified, the same on every process, or raises before anything was changed.
"""

from __future__ import annotations

import copy
import itertools
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import accelerate.accelerator as accelerate_module
from accelerate import Accelerator

from ciuic.integrations.checkpoint_pointer import Pointer, load_pointed, read_pointer, write_pointer
from ciuic.integrations.preconditions import ManagerOrDir, open_manager, refuse_kind, refuse_sharded
from ciuic.training.manager import SnapshotManager
from ciuic.training.state import stateful
from ciuic.training.state.boundaries import override, tell_after
from ciuic.training.state.data_position import Position, own_generators
from ciuic.training.state.stateful import load_into, state_of


def register(manager: SnapshotManager, accelerator: Accelerator) -> None:
    """Register what `prepare` and `register_for_checkpointing` know. Call it after the last of these.

    Raises:
        NotImplementedError: the state is sharded.
    """
    objects = _prepared(accelerator)
    manager.framework.join_ranks()
    # The first loader is taken for the training's; others are for evaluations, which a resumed run repeats
    # from their beginning.
    for loader in accelerator._dataloaders[:1]:
        if getattr(loader, "use_stateful_dataloader", False):
            objects |= {"loader": loader, "loader_pass": _PassCount(loader)}
        else:
            objects["loader"] = _LoaderPosition(loader)
    manager.register(**objects)


def store_states(where: ManagerOrDir, accelerator: Accelerator, **options: Any) -> SnapshotManager:
    """Let `accelerator.save_state` save to a repository, and `load_state` load what it saved. Every process calls it.

    Directories, automatic names, `total_limit` and hooks work as before, and `load_state` also loads directories that
    Accelerate has written by itself. The position in the data is not restored, as by Accelerate: a program skips
    batches itself. `save_state` returns when the state is copied; `manager.wait()` waits until it is durable.

    Args:
        where: a manager with nothing registered, or a directory in which to open one.
        accelerator: the accelerator.
        **options: arguments of `SnapshotManager`; with `total_limit`, give a `max_snapshots` that is no smaller.

    Returns:
        The manager.

    Raises:
        NotImplementedError: the state is sharded.
    """
    refuse_kind(accelerator.distributed_type)
    manager = open_manager(where, options)

    def objects() -> dict[str, Any]:
        loaders = [one for one in accelerator._dataloaders if getattr(one, "use_stateful_dataloader", False)]
        return _prepared(accelerator) | _numbered("loader", loaders)

    _StateDirectories(manager, accelerator, objects).install()
    return manager


def _prepared(accelerator: Accelerator) -> dict[str, Any]:
    """Return what `prepare` and `register_for_checkpointing` know, by name, without loaders.

    Raises:
        NotImplementedError: the state is sharded.
    """
    refuse_kind(accelerator.distributed_type)
    # Attributes that are not public: Accelerate has no other list of what `prepare` was given.
    for model in accelerator._models:
        refuse_sharded(model)
    objects: dict[str, Any] = {"accelerator": _StepCount(accelerator)}
    objects |= _numbered("model", [accelerator.unwrap_model(model) for model in accelerator._models])
    # The wrapped torch optimizer, whose hooks report its steps.
    objects |= _numbered("optimizer", [one.optimizer for one in accelerator._optimizers])
    objects |= _numbered("scheduler", accelerator._schedulers)
    objects |= _numbered("custom", accelerator._custom_objects)
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    return objects


def _numbered(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    """Name the objects ``model``, ``model_1`` ..."""
    return {name if not number else f"{name}_{number}": value for number, value in enumerate(objects)}


class _StepCount:
    """Count of batches by which the Accelerator knows when to take a step."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]


class _LoaderPosition(Position):
    """Position in a loader of Accelerate, which shuffles by the number of the pass."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._loader = loader

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loader.set_epoch(self.epoch)


class _PassCount:
    """Number of the current pass over a stateful loader, and the random generators at its beginning.

    Accelerate seeds its samplers by that number. Samplers that it does not seed draw their order from the
    generators, and the loader's own state, a number of batches, fits to that order alone.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iteration = loader.iteration
        self._at_begin: dict[str, Any] | None = None
        """Generators when the current pass began."""
        self._resume: dict[str, Any] | None = None
        """The same of a pass whose rest is the next one."""
        # Accelerate has asked the loader for its state, and torchdata keeps the iterator that it made for it, for
        # which it has drawn from the generators: the first pass could not be begun as it was. It is made anew.
        base = loader.base_dataloader
        if getattr(base, "_initial_iter_for_state_dict", False):
            base._iterator, base._initial_iter_for_state_dict = None, False
        # Counted where the loader records its position: it counts a pass only when it is asked for a batch
        # after the last, and a snapshot may come before or after that.
        tell_after(loader, "_update_state_dict", self._recorded)
        override(loader, "load_state_dict", _remembering_load)
        override(loader, "__iter__", self._iterating)

    def _recorded(self) -> None:
        self._iteration = self._loader.iteration

    def _generators(self) -> dict[str, Any]:
        own = own_generators(self._loader)
        return own | {
            f"base.{name}": one for name, one in own_generators(self._loader.base_dataloader).items()
        }

    def _random_state(self) -> dict[str, Any]:
        own = {name: copy.deepcopy(state_of(one, name)) for name, one in self._generators().items()}
        return {"random": stateful.random_states(), "own": own}

    def _restore(self, state: dict[str, Any]) -> None:
        stateful.restore_random_states(state["random"])
        for name, one in self._generators().items():
            if name in state["own"]:
                load_into(one, state["own"][name], name)

    def _iterating(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def begin(loader: Any) -> Iterator[Any]:
            resume, self._resume = self._resume, None
            at_snapshot = self._random_state()
            self._at_begin = at_snapshot if resume is None else resume
            batches: Iterator[Any] = iter(method(loader))
            if resume is None:
                yield from batches
                return
            # As at the beginning of the pass, so that the order is the same; what was drawn for it and for
            # the iterator had been drawn before the snapshot.
            self._restore(resume)
            begun = list(itertools.islice(batches, 1))
            self._restore(at_snapshot)
            yield from begun
            yield from batches

        return begin

    def state_dict(self) -> dict[str, Any]:
        # Before the first batch the loader has not recorded anything.
        finished = self._loader.state_dict().get("_iterator_finished")
        at_begin = self._at_begin if finished is False else None
        return {"iteration": self._iteration, "finished": bool(finished), "at_begin": at_begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iteration = state["iteration"]
        self._at_begin = self._resume = state["at_begin"]
        self._loader.set_epoch(state["iteration"] + state["finished"])


def _remembering_load(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a loader tell the position that it was given, not the one before, until it has read a batch."""

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        method(self, state)
        self.dl_state_dict = state

    return load_state_dict


POINTER_FILE: Final = "ciuic.json"
_CUSTOM_FILE: Final = "custom_checkpoint_{}.pkl"
_MAP_LOCATIONS: Final = (None, "cpu", "on_device")


class _StateDirectories:
    """`save_state` and `load_state` of one accelerator, over a manager."""

    def __init__(
        self, manager: SnapshotManager, accelerator: Any, objects: Callable[[], dict[str, Any]]
    ) -> None:
        """Prepare the methods.

        Args:
            manager: Manager that saves and loads.
            accelerator: The accelerator.
            objects: Returns the objects to save by name; called at each save and load.
        """
        self._manager = manager
        self._accelerator = accelerator
        self._objects = objects
        self._joined = False
        self._originals: dict[str, Any] = {}

    def install(self) -> None:
        """Replace the two methods of the accelerator, which keep their arguments.

        A pickle or a copy of the accelerator has Accelerate's own.
        """
        for name in ("save_state", "load_state"):
            override(self._accelerator, name, self._wrapped)

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            _check_map_location(kwargs.get("map_location"))
            self._take()
            with self._replaced():
                return method(accelerator, *args, **kwargs)

        return call

    def _take(self) -> None:
        # At the first call: a program may prepare objects after it has called `store_states`.
        if not self._joined:
            self._manager.framework.join_ranks()
            self._joined = True
        # At each call, as Accelerate looks: it may prepare and register more between two of them.
        self._manager.framework.set_objects(self._objects())

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Replace Accelerate's functions for files while one of the methods runs."""
        ours = {
            "save_accelerator_state": self._save,
            "save_custom_state": self._save_custom,
            "load_accelerator_state": self._load,
            "load_custom_state": self._load_custom,
        }
        self._originals = {name: getattr(accelerate_module, name) for name in ours}
        vars(accelerate_module).update(ours)
        try:
            yield
        finally:
            vars(accelerate_module).update(self._originals)

    def _save(self, output_dir: str | os.PathLike[str], *_: Any, **__: Any) -> Path:
        """Save a snapshot and name it in the directory."""
        tag = f"accelerate-{uuid.uuid4()}"
        save = self._manager.save_snapshot(tags=(tag, os.path.basename(os.path.abspath(output_dir))))
        # Only the first process has a save; without one the manager has logged why.
        if save is not None:
            write_pointer(
                Path(output_dir) / POINTER_FILE, Pointer(tag, str(self._manager.save_dir.absolute()))
            )
        return Path(output_dir)

    def _save_custom(
        self, _: Any, path: str | os.PathLike[str], index: int = 0, *__: Any, **___: Any
    ) -> None:
        # Accelerate compares the number of these files with that of the objects; their states are in the snapshot.
        if self._accelerator.is_main_process:
            (Path(path) / _CUSTOM_FILE.format(index)).write_bytes(b"")

    def _load(self, input_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Restore the snapshot that the directory names; what Accelerate has to set itself is returned."""
        file = Path(input_dir) / POINTER_FILE
        pointer = read_pointer(file)
        if pointer is None:
            found: dict[str, Any] = self._originals["load_accelerator_state"](input_dir, *args, **kwargs)
            return found
        if not pointer.is_in(self._manager.save_dir):
            raise ValueError(
                f"{file} names a snapshot in {pointer.repository}, and the manager has {self._manager.save_dir}: "
                "open the manager there"
            )
        # It may still be on its way to the disk.
        self._manager.wait()
        state = self._manager.framework.load_state(
            lambda: load_pointed(file, pointer, self._manager.save_dir)
        )
        assert state is not None, "load_pointed raises where there is no snapshot"
        self._manager.framework.restore(state)
        return {}

    def _load_custom(self, obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
        # Restored by `_load` with everything else.
        if read_pointer(Path(path) / POINTER_FILE) is None:
            self._originals["load_custom_state"](obj, path, index)


def _check_map_location(place: object) -> None:
    """Refuse what Accelerate refuses; states are restored where the objects are, whichever of the others it is.

    Raises:
        TypeError: The place is none of those.
    """
    if place not in _MAP_LOCATIONS:
        raise TypeError(
            f"Unsupported optimizer map location passed, expected one of {_MAP_LOCATIONS}, got {place!r}"
        )
