"""ciuic: copy-on-write snapshots under a running job, and exact restores.

This package is the library: types, errors, configuration, the repository and everything that reads it back.
It imports neither FUSE nor trio nor click, so that a repository can be read anywhere Python runs.

`SnapshotManager` and `check_resume` are imported on first use, so that the commands do not pay for them.
"""

from __future__ import annotations

import sys

# Not imported: `typing` takes 10 ms, in which ^C would show a traceback of a command (ciuic.cli).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ciuic.training.check_resume import check_resume
    from ciuic.training.manager import SnapshotManager

try:
    # Made when a wheel is built, from the tags (.ci/build.py).
    from ciuic._version import __version__
except ModuleNotFoundError:
    __version__ = "0+checkout"
__all__ = ["SNAPSHOTS_DIR_NAME", "STATE_DIR_NAME", "SnapshotManager", "__version__", "check_resume"]

STATE_DIR_NAME = b".ciuic-state"
"""Reserved name of the state directory at the top of a backing directory; hidden by the overlay, skipped by
capture."""
SNAPSHOTS_DIR_NAME = b".snapshots"
"""Name at the top of a root under which its snapshots are mounted, if its owner has nothing of that name."""


def __getattr__(name: str) -> object:
    if name in ("SnapshotManager", "check_resume"):
        # An ImportError, because of an AttributeError `from ciuic import …` would show only that there is no
        # such name.
        if sys.platform != "linux":
            raise ImportError(
                f"ciuic.{name} runs on Linux alone (on Windows: in WSL 2): its writer takes the state over "
                "through memory that only Linux has"
            )
        from ciuic import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
