"""`TrainingSnapshots`: the snapshots of one training, to list, load and mark, without a writer.

Guarantees: only `tag`, `hold` and `release` change the repository, durably on return; what is loaded was
checked byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ciuic.training import loading
from ciuic.training.format.reading import SavedSnapshot
from ciuic.training.format.results import State
from ciuic.training.writer import marks

_Self = TypeVar("_Self", bound="TrainingSnapshots")


class TrainingSnapshots:
    """Snapshots of one training in a repository.

    A copy is the object itself, and a pickle has directory and name alone: frameworks hold managers in
    objects that programs copy and pickle (a Trainer, a strategy), and one out of a pickle must neither create
    a repository on another machine nor save into one.
    """

    def __init__(self, save_dir: str | os.PathLike[str], name: str = "training") -> None:
        """Open nothing yet.

        Args:
            save_dir: Directory of the repository.
            name: Name of the run.
        """
        self.save_dir = Path(save_dir)
        self.name = name

    @property
    def _root(self) -> bytes:
        """Path of the training in its snapshots."""
        return os.fsencode(f"/{self.name}")

    def load_latest_snapshot(self) -> State | None:
        """Return the newest state that is whole; None if there is no snapshot.

        Raises:
            NothingGood: There are snapshots, and none is whole (a `Damaged`).
        """
        return loading.load_latest(self.save_dir, self._root)

    def load_snapshot(self, snapshot: str) -> State:
        """Return the state of one snapshot.

        Args:
            snapshot: An id, an unambiguous prefix of one, ``latest``, ``latest~2``, or a time.

        Raises:
            NotFound: There is no such snapshot.
            Damaged: The snapshot is not as it was saved.
            ValueError: This version of ciuic or of the framework does not know what was saved.
        """
        return loading.load_by_name(self.save_dir, snapshot)

    def list_snapshots(self) -> list[SavedSnapshot]:
        """Return the snapshots of this training, newest first; those that cannot be read are left out."""
        return loading.list_snapshots(self.save_dir, self._root)

    def tag(self, snapshot: str, *tags: str) -> None:
        """Add tags to a snapshot, durably on return.

        Raises:
            NotFound: There is no such snapshot.
            Busy: Another process holds the lock of the repository for longer than a minute.
        """
        marks.tag(self.save_dir, snapshot, tags)

    def hold(self, snapshot: str, reason: str = "held") -> None:
        """Keep a snapshot until `release`, whatever the rules say, durably on return; raises as `tag`."""
        marks.hold(self.save_dir, snapshot, reason)

    def release(self, snapshot: str) -> None:
        """Undo `hold`, durably on return; raises as `tag`."""
        marks.release(self.save_dir, snapshot)

    def __copy__(self: _Self) -> _Self:
        """Return the object itself."""
        return self

    def __deepcopy__(self: _Self, _: Mapping[int, Any]) -> _Self:
        """Return the object itself."""
        return self

    def __reduce__(self) -> tuple[type[TrainingSnapshots], tuple[str, str]]:
        """Pickle where the snapshots are, and nothing else."""
        return TrainingSnapshots, (str(self.save_dir), self.name)
