"""Whether a file system can let two files share extents."""

from __future__ import annotations

import fcntl
from pathlib import Path

_FICLONE = 0x40049409


def why_not(folder: Path) -> str:
    """Why it cannot, found out by trying; nothing when it can."""
    one, other = folder / ".one", folder / ".other"
    one.write_bytes(b"x" * 4096)
    try:
        with one.open("rb") as source, other.open("wb") as target:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError as error:
        return f"this file system shares no extents ({error.strerror})"
    finally:
        one.unlink()
        other.unlink(missing_ok=True)
    return ""
