"""A file planted in the destination of a lazy restore: what it is another name of stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ciuic.lazy.service import MARKER, LazyLayout


@pytest.mark.parametrize("plant", [os.link, os.symlink])
def test_a_planted_marker_is_replaced(tmp_path: Path, plant: object) -> None:
    """A hard or symbolic link in the marker's place is removed, and what it leads to is not written to."""
    place, secret = tmp_path / "restored", tmp_path / "secret"
    place.mkdir()
    secret.write_bytes(b"of root alone")
    marker = place / os.fsdecode(MARKER)
    plant(secret, marker)  # type: ignore[operator]
    fd = os.open(place, os.O_RDONLY)
    layout = LazyLayout(fd, os.fsencode(place))
    try:
        layout.mark()
    finally:
        layout.close()
        os.close(fd)
    assert secret.read_bytes() == b"of root alone"
    assert marker.read_text().startswith("This directory is being restored")
    assert (marker.is_symlink(), marker.stat().st_nlink) == (False, 1)
