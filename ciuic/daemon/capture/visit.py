"""Modes of visiting a directory; walk.py chooses between them."""

from __future__ import annotations

import enum


class Visit(enum.Enum):
    """Names of a directory that are visited."""

    TOUCHED = "touched"
    ALL = "all"
    COMPARE = "compare"
