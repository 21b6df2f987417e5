"""End-to-end tests run the installed commands and a real daemon; this gives each test one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import Live, installed, wait_for


@pytest.fixture
def live(short_tmp: Path) -> Iterator[Live]:
    """A configured ciuic with no roots yet and no daemon running."""
    try:
        installed()
    except FileNotFoundError as exc:
        pytest.fail(str(exc), pytrace=False)
    with Live(short_tmp) as one:
        yield one


@pytest.fixture
def root(short_tmp: Path) -> Path:
    """An existing empty directory to protect."""
    path = short_tmp / "root"
    path.mkdir()
    return path


@pytest.fixture
def protected(live: Live, root: Path) -> Live:
    """A running daemon with ``root`` protected, which has taken its first snapshot (of nothing) by itself."""
    live.run("protect", str(root))
    live.start(root)
    wait_for("the first snapshot", live.list, 60)
    return live
