"""Path of the control socket of a root's overlay worker, derived from the root so that it can be found from the mount point."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash


def root_key(root: str | bytes) -> str:
    """Return 16 hexadecimal digits that name a root in file names. Not secret; collisions are refused when roots are added."""
    # A hash, because the path of a root may be longer than a socket's name can be (108 bytes, unix(7)).
    return xxhash.xxh3_64_hexdigest(os.fsencode(root))


def worker_socket(runtime_dir: Path, root: str | bytes) -> Path:
    """Return the path of the control socket of the root's worker (docs/architecture.md, section 3)."""
    return runtime_dir / f"worker-{root_key(root)}.sock"
