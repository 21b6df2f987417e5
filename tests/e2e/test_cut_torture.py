"""The torture of the cut, short: every snapshot taken under many writers shows a moment of each writer's history."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from torture import cut

pytestmark = [pytest.mark.mount, pytest.mark.slow]


def test_every_snapshot_is_a_moment_of_every_writers_history(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts at random instants in two roots, with captures paused and killed, show no state that never was."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp))
    figures = cut.run(5, seed=20)
    assert [text for figure in figures for text in figure.failures] == []
    counts = {figure.name: figure.count for figure in figures}
    assert counts["snapshots checked"] > 0
    assert counts["records checked in them"] > 0
