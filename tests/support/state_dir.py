"""Where the state of a root lies whose parent directory belongs to root, as it does in tests (ciuic/state_directory.py)."""

from __future__ import annotations

import os
from pathlib import Path

from ciuic import STATE_DIR_NAME


def state_of(root: Path) -> Path:
    """The state directory of ``root``, mounted or not: beside it, by inode number or as the only one."""
    container = root.parent / os.fsdecode(STATE_DIR_NAME)
    found = list(container.iterdir()) if container.exists() else []
    numbered = [path for path in found if path.name.startswith(f"{root.stat().st_ino}-")]
    if len(numbered) == 1:
        return numbered[0]
    return found[0] if len(found) == 1 else container / "none"
