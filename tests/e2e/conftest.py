"""Fixtures of the end-to-end tests, which run the installed commands and a real daemon, one for each test."""

import pytest
from support.live import live as live
from support.live import protected as protected
from support.live import root as root


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave the tests of this folder to the full tier."""
    item.add_marker(pytest.mark.full)
