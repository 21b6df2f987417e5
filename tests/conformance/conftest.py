"""Fixtures of the conformance tests: one mount for a file's tests, and places on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.overlay import Overlay, overlay_over


@pytest.fixture(scope="module")
def overlay(run_dir: Path, request: pytest.FixtureRequest) -> Iterator[Overlay]:
    run_dir.chmod(0o711)
    root = run_dir / request.path.stem
    root.mkdir()
    with overlay_over(root, root.with_suffix(".sock")) as overlay:
        yield overlay


@pytest.fixture
def place(overlay: Overlay, request: pytest.FixtureRequest) -> Path:
    """Return an empty directory on the mount, writable by everyone."""
    path = overlay.root / request.node.name
    path.mkdir()
    path.chmod(0o777)
    return path
