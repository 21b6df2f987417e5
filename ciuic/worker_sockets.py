"""Where the overlay worker of a root listens: named after the root, so that whoever knows the mount finds it."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash


def root_key(root: str | bytes) -> str:
    """16 hex digits that name a root in file names; not secret, collisions are refused when roots are added."""
    return xxhash.xxh3_64_hexdigest(os.fsencode(root))


def worker_socket(runtime_dir: Path, root: str | bytes) -> Path:
    """docs/architecture.md, section 3."""
    return runtime_dir / f"worker-{root_key(root)}.sock"
