"""Fixtures of the end-to-end tests, which run the installed commands and a real daemon, one for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import Live, installed, wait_for


@pytest.fixture
def live(short_tmp: Path) -> Iterator[Live]:
    """Provide a configured ciuic with no roots yet and no daemon running."""
    try:
        installed()
    except FileNotFoundError as exc:
        pytest.fail(str(exc), pytrace=False)
    with Live(short_tmp) as one:
        yield one


@pytest.fixture
def root(short_tmp: Path) -> Path:
    """Provide an existing empty directory to protect."""
    path = short_tmp / "root"
    path.mkdir()
    return path


@pytest.fixture
def protected(live: Live, root: Path) -> Live:
    """Provide a running daemon with ``root`` protected, which has taken its first snapshot by itself."""
    live.run("protect", str(root))
    live.start(root)
    wait_for("the first snapshot", live.list, 60)
    return live
