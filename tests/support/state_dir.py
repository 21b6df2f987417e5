"""Place of a root's state where root owns the parent directory, as in tests (state_directory.py)."""

from __future__ import annotations

import os
from pathlib import Path

from ciuic import STATE_DIR_NAME


def state_of(root: Path) -> Path:
    """Return the state directory of ``root``, mounted or not: beside it, by inode number, or the only one."""
    container = root.parent / os.fsdecode(STATE_DIR_NAME)
    found = [path for path in container.iterdir() if path.is_dir()] if container.exists() else []
    numbered = [path for path in found if path.name.startswith(f"{root.stat().st_ino}-")]
    if len(numbered) == 1:
        return numbered[0]
    return found[0] if len(found) == 1 else container / "none"
