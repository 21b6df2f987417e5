"""Directories of Accelerate's `save_state` that name a snapshot in place of files with the state.

Accelerate's own methods run, with its rules for names, limits and hooks; only the functions that write and read
the files are replaced while they run. `ciuic.json` in a directory names the snapshot (as `lightning_pointer`).
A directory without it is Accelerate's own, and is loaded by Accelerate.

Guarantees: `load_state` restores the snapshot that the directory names, verified, the same on every process, or
raises before anything was changed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import accelerate.accelerator as accelerate_module

from ciuic.integrations.lightning_pointer import Pointer, load_pointed, read_pointer, write_pointer
from ciuic.training.manager import SnapshotManager
from ciuic.training.state.method_hooks import override

POINTER_FILE: Final = "ciuic.json"
_CUSTOM_FILE: Final = "custom_checkpoint_{}.pkl"
_MAP_LOCATIONS: Final = (None, "cpu", "on_device")


class StateDirectories:
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
