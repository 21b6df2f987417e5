"""ciuic: copy-on-write snapshots under a running job, and an exact way back.

The library half: types, errors, configuration, the repository and everything that reads it back. It imports
neither FUSE nor trio nor click, so that a repository can be read anywhere Python runs. `SnapshotManager` is imported when it is
first asked for: the commands should not pay for it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ciuic.training import SnapshotManager, check_resume

__version__ = "0.1.0"
__all__ = ["STATE_DIR_NAME", "SnapshotManager", "__version__", "check_resume"]

STATE_DIR_NAME = b".ciuic-state"
"""The one reserved name at the top of a root's backing directory; the overlay hides it and capture skips it."""


def __getattr__(name: str) -> object:
    if name in ("SnapshotManager", "check_resume"):
        if sys.platform != "linux":
            raise ImportError(
                f"ciuic.{name} runs on Linux alone (on Windows: in WSL 2): its writer takes the state over through memory that only Linux has"
            )
        from ciuic import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
