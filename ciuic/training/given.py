"""What programs give to `SnapshotManager`, looked at before anything is done with it: mistakes are answered by one sentence that says which."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Mapping
from typing import Any, Final

from ciuic.training.stateful import has_state

_OURS: Final = ("values", "random_state", "epoch", "step", "metrics")
"""What a state has beside the program's values."""
_MOST: Final = 2**63


def whole_number(value: Any, what: str) -> int:
    """Also NumPy's, and a tensor of one. TypeError; ValueError for what takes more than eight bytes."""
    try:
        number = operator.index(int(value) if isinstance(value, float) and value.is_integer() else value)
    except TypeError:
        raise TypeError(f"{what} is a whole number, not {value!r}") from None
    if not -_MOST <= number < _MOST:
        raise ValueError(f"{what} {number} is too large")
    return number


def count(value: Any, what: str, least: int = 1) -> int:
    """TypeError; ValueError."""
    number = whole_number(value, what)
    if number < least:
        raise ValueError(f"{what} is from {least} on, not {number}")
    return number


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """TypeError."""
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"the metric {name} is a number, not {value!r}") from None
    return found


def directory(save_dir: Any) -> str:
    """Absolute. TypeError."""
    if not isinstance(save_dir, (str, os.PathLike)):
        raise TypeError(f"save_dir is the path of a directory, not {save_dir!r}")
    return os.path.abspath(os.fsdecode(save_dir))


def one_of(value: Any, allowed: Collection[str], what: str) -> None:
    """ValueError."""
    if value not in allowed:
        raise ValueError(f"{what} is one of {', '.join(allowed)}, not {value!r}")


def file_name(name: str) -> None:
    """ValueError."""
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} cannot be the name of a directory")


def several(value: Any, what: str) -> tuple[Any, ...]:
    """Rules, of which one alone may be given as it is. TypeError."""
    if hasattr(value, "__iter__"):
        return tuple(value)
    if isinstance(value, (int, float)) or value is None:
        raise TypeError(f"{what} are rules (docs/snapshot-manager.md), not {value!r}")
    return (value,)


def texts(value: Any) -> tuple[str, ...]:
    """Tags, of which one alone may be given as it is. TypeError."""
    found = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(one, str) for one in found):
        raise TypeError(f"tags are texts, not {value!r}")
    return found


def reason(hold: Any) -> str:
    """TypeError."""
    if hold is True:
        return "held"
    if not isinstance(hold, str):
        raise TypeError(f"hold is the reason for which the snapshot stays, not {hold!r}")
    return hold


def objects_and_values(
    model: Any, optimizer: Any, others: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What has a state, and what is a plain value. A model or an optimizer that is given by its state_dict is saved once, for what is changed
    by later steps is not in it; it comes back as that of an object. What else they may be is for `way_of` to say. TypeError; ValueError for
    a name under which a value could not come back."""
    if hasattr(model, "param_groups") and hasattr(optimizer, "parameters"):
        raise TypeError("model and optimizer are the other way round: save_snapshot(model, optimizer, epoch)")
    objects = {name: value for name, value in others.items() if has_state(value)}
    values = {name: value for name, value in others.items() if name not in objects}
    for name, value in (("model", model), ("optimizer", optimizer)):
        if isinstance(value, dict):
            values[f"{name}_state_dict"] = value
        elif value is not None:
            objects[name] = value
    for name in values:
        if not name.isidentifier() or name in _OURS or name.removesuffix("_state_dict") in objects:
            raise ValueError(f"{name!r} cannot be the name of a value: a state has something else under it")
    return objects, values
