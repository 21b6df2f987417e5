"""Results of `SnapshotManager` methods: a loaded state, the point of resumption, one save, and statistics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ciuic.training.format.reading import Facts, Loaded, PassedOver

EXIT_SECONDS: Final = 120.0
"""Default timeout for callers that wait for the writer."""


class SaveWaiter(Protocol):
    """Waits for the writer on behalf of a save."""

    def wait(self, timeout_seconds: float, *, number: int | None = None) -> bool:
        """Wait until a save is answered, or all are; return whether that came in time."""
        ...

    def wait_remote(self, id_: str, timeout_seconds: float) -> bool:
        """Wait until every remote has stored a snapshot; return whether that came in time."""
        ...


class State(dict[str, Any]):
    """A loaded state.

    Its keys are `NAME_state_dict` for each object, `epoch`, `step`, `metrics`, `random_state`, and the name
    of every value that was saved beside the objects. Tensors are on the CPU.
    """

    def __init__(self, loaded: Loaded) -> None:
        """Arrange what was loaded."""
        super().__init__()
        plain = set(loaded.values.get("plain", ()))
        # Plain values come back under the names that the program gave them, objects as state_dicts.
        for name, value in loaded.objects.items():
            self[name if name in plain else f"{name}_state_dict"] = value
        self |= {"epoch": loaded.facts.epoch, "step": loaded.facts.step, "metrics": loaded.facts.metrics}
        self["random_state"] = loaded.values["random"]
        self.id = loaded.id
        """Id of the snapshot."""
        self.facts = loaded.facts
        self.passed_over: list[PassedOver] = loaded.passed_over
        """Newer snapshots that are not whole, with the reasons."""
        self.passes: dict[str, Any] | None = loaded.values.get("passes")
        """Passes over a loader that tells its own position, and the epoch that the program gave."""
        self.ranks: dict[str, Any] = loaded.values.get("ranks", {})
        """Differences of the other ranks from rank 0, by rank as text."""


@dataclass(frozen=True)
class Resumed:
    """Point at which a run continues."""

    id: str
    """Id of the snapshot."""
    step: int
    """Optimizer steps done."""
    epoch: int | None
    """Epoch that the program gave last.

    Where a plain loader is registered, or one that tells its own position and the program gave no epoch: the epoch
    to continue with, counted from 0. That is the one it was in, or the next if its pass had ended.
    """
    batch: int
    """Batches of that epoch that were taken before; the registered loader skips them by itself."""
    passed_over: tuple[PassedOver, ...] = ()
    """Newer snapshots that are not whole, with the reasons."""


@dataclass
class Stats:
    """Statistics of a manager's saves so far."""

    saved: int = 0
    """Durable snapshots."""
    skipped: int = 0
    """Saves that were due while both arenas were still being written."""
    failed: int = 0
    """Saves that failed; `last_error` has the reason of the last one."""
    stall_seconds: float = 0.0
    """Total time for which the training stood still for saving."""
    last_stall_seconds: float = 0.0
    """The same for the last save."""
    last_write_seconds: float = 0.0
    """Time from the end of the last stall to the commit."""
    last_id: str = ""
    last_error: str = ""
    filesystem: int = 0
    """Durable snapshots with a snapshot of the files of the same instant."""
    filesystem_failed: int = 0
    """Durable snapshots without the snapshot of the files that was asked for."""
    last_filesystem_id: str = ""
    last_filesystem_error: str = ""


@dataclass(frozen=True)
class SaveResult:
    """End of one save, for callbacks of `SnapshotManager.on_saved`."""

    id: str | None
    """Id of the snapshot, which is durable; None if the save failed."""
    step: int | None
    """Optimizer steps of the run at the save."""
    epoch: int | None
    metrics: Mapping[str, float]
    error: str | None = None
    """Why the save failed; None if it has not."""

    @property
    def durable(self) -> bool:
        """True if there is a snapshot, False if the save failed."""
        return self.id is not None

    @classmethod
    def of(cls, facts: Facts, *, id_: str | None = None, error: str | None = None) -> SaveResult:
        """Return the end of a save with these facts."""
        return cls(id_, facts.step, facts.epoch, dict(facts.metrics), error)


class Save:
    """Handle of one save that has begun; the program may ignore it."""

    def __init__(self, manager: SaveWaiter, number: int) -> None:
        """Create the handle of save ``number``."""
        self.id: str | None = None
        """Id of the snapshot, once it is durable."""
        self.error: str | None = None
        """Why the save failed, if it has."""
        self.filesystem: str | None = None
        """Id of the snapshot of the files of the same instant, in the daemon's repository."""
        self._manager = manager
        self._number = number

    def __repr__(self) -> str:
        """Return the number of the save, and what has become of it so far."""
        if self.error is not None:
            return f"<Save {self._number}: failed: {self.error}>"
        return f"<Save {self._number}: {'being written' if self.id is None else f'durable as {self.id}'}>"

    @property
    def done(self) -> bool:
        """True if the snapshot is durable, or the save has failed."""
        return self.id is not None or self.error is not None

    def wait(self, timeout_seconds: float = EXIT_SECONDS, *, remote: bool = False) -> str | None:
        """Wait for the snapshot to be durable.

        Args:
            timeout_seconds: How long to wait at most.
            remote: Wait until every remote of the manager has stored it, too.

        Returns:
            Its id; None if the save failed or is not done in time.

        Raises:
            ValueError: The manager has no remote.
        """
        end = time.monotonic() + timeout_seconds
        self._manager.wait(timeout_seconds, number=self._number)
        if remote and self.id is not None:
            return self.id if self._manager.wait_remote(self.id, end - time.monotonic()) else None
        return self.id
