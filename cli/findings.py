"""What ``ciuic doctor`` finds: one line of ok, warning or problem, each warning and problem with its remedy."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """``check`` is a stable name; ``remedy`` says what to do, empty when nothing need be done."""

    check: str
    level: Level
    message: str
    remedy: str = ""


def ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "problem", message, remedy)
