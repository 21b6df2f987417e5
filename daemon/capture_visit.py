"""The three ways to visit a directory (capture_walk says when which)."""

from __future__ import annotations

import enum


class Visit(enum.Enum):
    """What is looked at in a directory."""

    TOUCHED = "touched"
    ALL = "all"
    COMPARE = "compare"
