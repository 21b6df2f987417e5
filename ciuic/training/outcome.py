"""What `SnapshotManager` hands to the program: a state, where a run goes on, one save, and what saving has come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from ciuic.training.reading import Loaded, PassedOver

EXIT_SECONDS: Final = 120.0
"""For so long whoever asks waits for the writer, unless he says otherwise."""


class Waits(Protocol):
    """The manager, as a save sees it."""

    def wait(self, timeout_seconds: float, *, number: int | None = None) -> bool: ...


class State(dict[str, Any]):
    """What `load_latest_snapshot` returns: `NAME_state_dict` of each object, `epoch`, `step`, `metrics`, `random_state`, and every
    value that was saved beside them. Tensors are on the CPU."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__()
        plain = set(loaded.values.get("plain", ()))
        for name, value in loaded.objects.items():
            self[name if name in plain else f"{name}_state_dict"] = value
        self |= {"epoch": loaded.facts.epoch, "step": loaded.facts.step, "metrics": loaded.facts.metrics}
        self["random_state"] = loaded.values["random"]
        self.id = loaded.id
        """Of the snapshot."""
        self.facts = loaded.facts
        self.passed_over: list[PassedOver] = loaded.passed_over
        """Newer snapshots that are not whole, and why."""
        self.ranks: dict[str, Any] = loaded.values.get("ranks", {})
        """By rank: what it had otherwise than rank 0."""


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    id: str
    """Of the snapshot it was taken from."""
    step: int
    """Optimizer steps done."""
    epoch: int | None
    """The epoch that was given last; where a plain loader is registered the one to go on with (0 is the first): that which it was in,
    or, had its pass come to its end, the next."""
    batch: int
    """Batches of that epoch which the registered loader gave out before; it goes on behind them by itself."""
    passed_over: tuple[PassedOver, ...] = ()


@dataclass
class Stats:
    """What saving has come to so far."""

    saved: int = 0
    skipped: int = 0
    """Saves that were due while both arenas were still being written."""
    failed: int = 0
    stall_seconds: float = 0.0
    """How long the training stood still for saving, in all."""
    last_stall_seconds: float = 0.0
    last_write_seconds: float = 0.0
    """From the end of the stall to the commit."""
    last_id: str = ""
    last_error: str = ""
    filesystem: int = 0
    """Of those that were saved: with a snapshot of the files of the same instant."""
    filesystem_failed: int = 0
    """Of those that were saved: without the files that were asked for."""
    last_filesystem_id: str = ""
    last_filesystem_error: str = ""


class Save:
    """One save that was begun. Nobody needs to look at it."""

    def __init__(self, manager: Waits, number: int) -> None:
        self.id: str | None = None
        """Of the snapshot, once it is durable."""
        self.error: str | None = None
        self.filesystem: str | None = None
        """Id of the snapshot of the files of the same instant, in the daemon's repository."""
        self._manager = manager
        self._number = number

    @property
    def done(self) -> bool:
        return self.id is not None or self.error is not None

    def wait(self, timeout_seconds: float = EXIT_SECONDS) -> str | None:
        """The id as soon as it is durable; None when it failed or is not done in time."""
        self._manager.wait(timeout_seconds, number=self._number)
        return self.id
