"""Conditions of a status, as `kubectl describe` and `kubectl wait` read them (Kubernetes API conventions, "Typical status properties").

Guarantees: a condition that says the same keeps its time of transition, so that a status which is computed anew is equal to the
one that is stored, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final, Literal

Truth = Literal["True", "False", "Unknown"]
# Of the schema. What an event may say is shorter, and cut where it is written.
_MAX_MESSAGE: Final = 4096


@dataclass(frozen=True)
class Condition:
    """One condition; ``reason`` is a word in CamelCase, ``message`` a sentence."""

    type: str
    status: Truth
    reason: str
    message: str
    is_trouble: bool = False
    """True if its event is a Warning."""


def merged(
    previous: Sequence[Mapping[str, Any]], new: Sequence[Condition], generation: int
) -> tuple[list[dict[str, Any]], list[Condition]]:
    """Return the conditions to store, and those of them whose status or reason has changed."""
    known = {one["type"]: one for one in previous}
    stored: list[dict[str, Any]] = []
    changed: list[Condition] = []
    for one in new:
        before = known.get(one.type, {})
        same_status = before.get("status") == one.status
        if not same_status or before.get("reason") != one.reason:
            changed.append(one)
        stored.append(
            {
                "type": one.type,
                "status": one.status,
                "reason": one.reason,
                "message": one.message[:_MAX_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": before["lastTransitionTime"] if same_status else now(),
            }
        )
    return stored, changed


def now() -> str:
    """Return the present time as the API writes it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
