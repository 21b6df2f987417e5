"""Snapshots under many writers, a short run of the cut torture: each is a moment of all histories."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from torture import cut

pytestmark = [pytest.mark.mount, pytest.mark.slow]


def test_every_snapshot_is_a_moment_of_every_writers_history(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts at random instants in two roots, with captures disturbed, show only states that existed."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp))
    figures = cut.run(5, seed=20)
    assert [text for figure in figures for text in figure.failures] == []
    counts = {figure.name: figure.count for figure in figures}
    assert counts["snapshots checked"] > 0
    assert counts["records checked in them"] > 0
