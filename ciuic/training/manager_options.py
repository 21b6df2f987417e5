"""`ManagerOptions`: how a `SnapshotManager` works with processes, ranks and devices, which few programs have to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from ciuic.training.util.deprecation import warn_deprecated


@dataclass(frozen=True)
class ManagerOptions:
    """Options that most programs leave alone: ``SnapshotManager(…, options=ManagerOptions(nice=19))``.

    One object may serve several managers. Values out of range are refused by the manager.
    """

    nice: int = 10
    """Niceness of the writer process, added to that of the training."""
    distributed: bool | None = None
    """Whether this process is one of several ranks that train one model; then all ranks create a manager and call
    the same methods. None: yes, if torch.distributed is initialized for several ranks."""
    agree: Callable[[bool], bool] | None = None
    """Called by every rank at each boundary with whether this rank was told of preemption; returns whether any rank
    was. None: the manager asks the other ranks itself."""
    heartbeat_seconds: float | None = None
    """Time without a step, a report or a save after which a daemon on the same machine takes the training for hung
    (docs/daemon.md, Trainers). None: never; the daemon notices the death of the training in any case."""
    overlap: bool = True
    """Whether an automatic snapshot copies trained weights from an accelerator beside the next forward and backward
    pass. False for programs that change them other than by optimizer steps, without torch noticing
    (device/async_copy.py)."""


class OldKeywords(TypedDict, total=False):
    """Keyword arguments of `SnapshotManager` that are fields of `ManagerOptions` now."""

    nice: int
    distributed: bool | None
    agree: Callable[[bool], bool] | None
    heartbeat_seconds: float | None
    overlap: bool


def options_of(options: ManagerOptions | None, old: dict[str, Any]) -> ManagerOptions:
    """Return the options of a manager, from the object or from old keyword arguments of its constructor, which warn.

    Raises:
        TypeError: There is no such keyword, or options are given in both ways, or as another object.
    """
    if unknown := old.keys() - OldKeywords.__annotations__.keys():
        raise TypeError(f"SnapshotManager() got an unexpected keyword argument {min(unknown)!r}")
    if options is not None and not isinstance(options, ManagerOptions):
        raise TypeError(f"options must be ciuic.training.ManagerOptions, got {options!r}")
    if not old:
        return options or ManagerOptions()
    names = "…, ".join(f"{name}=" for name in old)
    if options is not None:
        raise TypeError(f"{names} must be given in options= alone, which is there too")
    warn_deprecated(
        f"{names} of SnapshotManager()", f"options=ciuic.training.ManagerOptions({names}…)", stacklevel=4
    )
    return ManagerOptions(**old)
