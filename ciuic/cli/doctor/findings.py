"""Findings of ``ciuic doctor``: ok, warning or problem, each warning and problem with a remedy."""

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
    """Return a finding that needs nothing."""
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    """Return a finding to look at, with its remedy."""
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """Return a finding that needs the operator, with its remedy."""
    return Finding(check, "problem", message, remedy)
