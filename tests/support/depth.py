"""How often a test repeats itself: as far as one run has time, or as far as `make torture` goes."""

from __future__ import annotations

import os
from typing import TypeVar

_T = TypeVar("_T")
IN_TORTURE = os.environ.get("HYPOTHESIS_PROFILE") == "torture"


def by_depth(usual: _T, torture: _T) -> _T:
    """Return what one run of the suite has time for, in `make torture` the larger one."""
    return torture if IN_TORTURE else usual
