"""Fixtures of the end-to-end tests, which run the real commands and a real daemon, one for each test or for a file's tests."""

import pytest
from support.live import live as live
from support.live import protected as protected
from support.live import root as root
from support.live import shared as shared
from support.site import site as site


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave the tests of this folder to the full tier."""
    item.add_marker(pytest.mark.full)
