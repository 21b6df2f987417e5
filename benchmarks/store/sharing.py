"""Test of a file system for extents that two files share."""

from __future__ import annotations

import fcntl
from pathlib import Path

_FICLONE = 0x40049409


def unsupported_reason(folder: Path) -> str:
    """Try to clone a file (FICLONE); return why it fails, or an empty string if it works."""
    original, clone = folder / ".original", folder / ".clone"
    original.write_bytes(b"x" * 4096)
    try:
        with original.open("rb") as source, clone.open("wb") as target:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError as error:
        return f"this file system shares no extents ({error.strerror})"
    finally:
        original.unlink()
        clone.unlink(missing_ok=True)
    return ""
