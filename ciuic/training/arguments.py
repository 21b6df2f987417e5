"""Arguments of the public calls: their validation, `ManagerOptions`, and old names that still work.

Guarantees: each mistake raises one sentence that names it. An old name works for one version and says what replaced it.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from ciuic.training.state.stateful import has_state

_RESERVED_NAMES: Final = ("values", "random_state", "epoch", "step", "metrics")
"""Keys of a state that are not the program's own."""
# MessagePack has no larger integers.
_INT64_LIMIT: Final = 2**63


def whole_number(value: Any, what: str) -> int:
    """Return an integer; NumPy's, a tensor of one element and an integral float are integers too.

    Raises:
        TypeError: The value is no integer.
        ValueError: The value does not fit into 64 bits.
    """
    try:
        # NumPy's integers and tensors of one element have __index__; text and floats such as 2.5 have not.
        number = operator.index(int(value) if isinstance(value, float) and value.is_integer() else value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, got {value!r}") from None
    if not -_INT64_LIMIT <= number < _INT64_LIMIT:
        raise ValueError(f"{what} must fit into 64 bits, got {number}")
    return number


def count(value: Any, what: str, least: int = 1) -> int:
    """Return an integer that is ``least`` or larger.

    Raises:
        TypeError: The value is no integer.
        ValueError: The value is too small.
    """
    number = whole_number(value, what)
    if number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}")
    return number


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats.

    Raises:
        TypeError: A metric is no number.
    """
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"the metric {name} must be a number, got {value!r}") from None
    return found


def directory(save_dir: Any) -> str:
    """Return the absolute path of a directory.

    Raises:
        TypeError: The value is no path.
    """
    if not isinstance(save_dir, (str, os.PathLike)):
        raise TypeError(f"save_dir must be the path of a directory, got {save_dir!r}")
    # Absolute: the writer process runs in `/`, and the program may change its directory.
    return os.path.abspath(os.fsdecode(save_dir))


def one_of(value: Any, allowed: Collection[str], what: str) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(allowed)}, got {value!r}")


def file_name(name: str) -> None:
    """Raise ValueError unless the name can be the name of a directory."""
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"name must be usable as the name of a directory, got {name!r}")


def is_value_name(name: str) -> bool:
    """Return whether a value or an object can have this name in a state."""
    return name.isidentifier() and name not in _RESERVED_NAMES


def several(value: Any, what: str) -> tuple[Any, ...]:
    """Return rules as a tuple; a single rule may be given without one.

    Raises:
        TypeError: The value is a number or None.
    """
    # A single rule has no __iter__; a mistaken text has, and its characters are refused as rules.
    if hasattr(value, "__iter__"):
        return tuple(value)
    if isinstance(value, (int, float)) or value is None:
        raise TypeError(f"{what} must be rules (docs/snapshot-manager.md), got {value!r}")
    return (value,)


def texts(value: Any) -> tuple[str, ...]:
    """Return tags as a tuple; a single tag may be given without one.

    Raises:
        TypeError: A tag is no string.
    """
    # A string is a sequence too, of its letters.
    found = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(one, str) for one in found):
        raise TypeError(f"tags must be strings, got {value!r}")
    return found


def reason(hold: Any) -> str:
    """Return the reason of a hold; ``held`` for True.

    Raises:
        TypeError: The value is neither a string nor True.
    """
    if hold is True:
        return "held"
    if not isinstance(hold, str):
        raise TypeError(f"hold must be the reason to keep the snapshot, or True, got {hold!r}")
    return hold


def objects_and_values(
    model: Any, optimizer: Any, others: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate objects that have a state from plain values.

    A model or an optimizer given as its state_dict is a value, saved once, because later steps do not change
    it; it comes back as the state_dict of an object. `state_access` decides what else they may be.

    Returns:
        Objects by name, and values by name.

    Raises:
        TypeError: Model and optimizer are swapped, or one of them is a plain value.
        ValueError: A value cannot come back under its name.
    """
    if hasattr(model, "param_groups") and hasattr(optimizer, "parameters"):
        raise TypeError("model and optimizer are swapped, expected save_snapshot(model, optimizer, epoch)")
    objects = {name: value for name, value in others.items() if has_state(value)}
    values = {name: value for name, value in others.items() if name not in objects}
    for name, value in (("model", model), ("optimizer", optimizer)):
        # A state_dict is no object, so that nothing could be restored in place; it was dropped silently once.
        if isinstance(value, dict):
            values[f"{name}_state_dict"] = value
        elif isinstance(value, (str, bytes, int, float, complex, tuple, set)):
            raise TypeError(
                f"{name} must have state_dict() and load_state_dict(), got an object of type "
                f"{type(value).__qualname__}: give a plain value a name of its own, "
                f"such as save_snapshot(note={value!r:.40})"
            )
        elif value is not None:
            objects[name] = value
    for name in values:
        if not is_value_name(name) or name.removesuffix("_state_dict") in objects:
            raise ValueError(f"a value must have a name that no state uses itself, got {name!r}")
    return objects, values


def warn_deprecated(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Issue a DeprecationWarning at the line of the program.

    Args:
        old: What the program has.
        new: What it should have instead.
        stacklevel: Frames up to the program, this function included.
    """
    warnings.warn(
        f"{old} is deprecated and goes with the next version of ciuic: use {new}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


@dataclass(frozen=True)
class ManagerOptions:
    """Options that most programs leave alone: ``SnapshotManager(…, options=ManagerOptions(nice=19))``.

    One object may serve several managers. Values out of range are refused by the manager.
    """

    nice: int = 10
    """Niceness of the writer process, added to that of the training."""
    distributed: bool | None = None
    """True if this process is one of several ranks that train one model; then all ranks create a manager and call
    the same methods. None: True if torch.distributed is initialized for several ranks."""
    agree: Callable[[bool], bool] | None = None
    """Called by every rank at each boundary with whether this rank was told of preemption; returns whether any rank
    was. None: the manager asks the other ranks itself."""
    heartbeat_seconds: float | None = None
    """Time without a step, a report or a save after which a daemon on the same machine takes the training for hung
    (docs/daemon.md, Trainers). None: never; the daemon notices the death of the training in any case."""
    overlap: bool = True
    """True to copy trained weights of an automatic snapshot from an accelerator beside the next forward and backward
    pass. False for programs that change them other than by optimizer steps, without torch noticing
    (device_copy.py)."""
    allow_other_optimizer: bool = False
    """True to resume with an optimizer of another class than the one that was saved, as far as PyTorch loads its state."""


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
